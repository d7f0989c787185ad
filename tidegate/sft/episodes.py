"""Reads recorded episodes, selects among them, and keeps their token ids and masks as they were recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import ConfigError
from tidegate.gateway.rendering.messages import template_form
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.loading import did_you_mean
from tidegate.program import advise_extra
from tidegate.settings.sft import SFTSettings
from tidegate.sft.chats import escaped, reply_ids
from tidegate.sft.demonstration import Demonstration, demonstration
from tidegate.trainer.records.export import corrections_of, is_left_out, of_policy, reward_of, sequences_of
from tidegate.trainer.records.trajectories import decode_trajectory, read_lines, step_files

COLUMNS = ("session_id", "group_id", "task_id", "reward", "reward_parts", "input_ids", "trained")
"""Columns of an exported table that are read."""
POLICIES = ("policy", "policy_rewards")
"""Further columns, which older tables lack: they are of runs with one policy."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An episode that may be selected."""

    line: Mapping[str, Any]
    make: Callable[[], list[Any]]
    """Returns its token sequences, which have `ids` and `mask`."""


def read_episodes(path: Path, settings: SFTSettings) -> Iterator[Demonstration]:
    """Yield the selected episodes of a run's directory or of an exported table, in order.

    Raises:
        ConfigError: There is neither, or it lacks what the selection needs.
        TidegateError: It is damaged.
    """
    parts: set[str] = set()
    found = False
    for candidates in _steps(path):
        scored = [(_score(candidate.line, settings), candidate) for candidate in candidates]
        for _, candidate in scored:
            parts |= set(candidate.line.get("reward_parts", ()))
        found = found or any(score is not None for score, _ in scored)
        for candidate in _selected(scored, settings):
            line = candidate.line
            rows = of_policy(candidate.make(), settings.policy, "sft.policy")
            sequences = [(row.ids, row.mask) for row in rows]
            if settings.policy is not None and not rows:
                continue  # the policy has no turn in the episode
            yield demonstration(line["task_id"], f"{path}, episode {line['session_id']}", sequences)
    if not found and settings.reward_part is not None:
        raise ConfigError(
            f"sft.reward_part: no episode of {path} has a part {settings.reward_part!r} of its reward"
            f"{did_you_mean(settings.reward_part, parts)}; there are {', '.join(sorted(parts)) or 'none'}"
        )


def _score(line: Mapping[str, Any], settings: SFTSettings) -> float | None:
    """Return what episodes are compared by; None for those that are not trained on."""
    if line["reward"] is None or line.get("left_out"):
        return None
    part = settings.reward_part
    value = reward_of(line, settings.policy) if part is None else line.get("reward_parts", {}).get(part)
    return None if value is None else float(value)


def _selected(scored: list[tuple[float | None, _Candidate]], settings: SFTSettings) -> list[_Candidate]:
    """Return the selected episodes of a step: of equal rewards of a group, the first ones."""
    enough = [(score, each) for score, each in scored if score is not None and score >= settings.min_reward]
    if settings.per_group is None:
        return [each for _, each in enough]
    groups: dict[str, list[tuple[float, int]]] = {}
    for at, (score, each) in enumerate(enough):
        groups.setdefault(each.line["group_id"], []).append((-score, at))
    chosen = {at for members in groups.values() for _, at in sorted(members)[: settings.per_group]}
    return [each for at, (_, each) in enumerate(enough) if at in chosen]


def _steps(path: Path) -> Iterator[list[_Candidate]]:
    """Yield the episodes of each step."""
    if path.is_dir():
        for file in step_files(path).values():
            yield [_recorded(line) for line in read_lines(file)]
    elif path.suffix == ".parquet" and path.is_file():
        yield from _table(path)
    else:
        raise ConfigError(
            f"sft.episodes: {path} is neither a run's directory nor a table that tidegate export --parquet "
            "wrote"
        )


def _recorded(line: dict[str, Any]) -> _Candidate:
    return _Candidate({**line, "left_out": is_left_out(line)}, lambda: sequences_of(line))


@dataclass(frozen=True, slots=True)
class _TableRow:
    """A sequence of an exported table."""

    ids: Any
    mask: Any
    policy: str | None


def _table(path: Path) -> Iterator[list[_Candidate]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"reading {path} needs pyarrow: {advise_extra('data')}") from None
    try:
        file = parquet.ParquetFile(path)
        if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
            raise ConfigError(
                f"{path} has no column {', '.join(missing)}: export it with tidegate export --parquet"
            )
        for number in range(file.num_row_groups):  # one for each step
            columns = [*COLUMNS, *(name for name in POLICIES if name in file.schema_arrow.names)]
            yield _of_step(file.read_row_group(number, columns=columns).to_pylist())
    except ArrowException as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _of_step(rows: list[dict[str, Any]]) -> list[_Candidate]:
    """Return the episodes of a step's rows, each of which is a sequence."""
    by_session: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_session.setdefault(row["session_id"], []).append(row)
    return [_of_session(members) for members in by_session.values()]


def _of_session(members: list[dict[str, Any]]) -> _Candidate:
    def make() -> list[_TableRow]:
        return [
            _TableRow(
                np.array(row["input_ids"], dtype=np.int32),
                np.array(row["trained"], dtype=np.bool_),
                row.get("policy"),
            )
            for row in members
        ]

    left_out = not any(any(row["trained"]) for row in members)
    parts = {name: dict(members[0].get(name) or ()) for name in ("reward_parts", "policy_rewards")}
    return _Candidate({**members[0], **parts, "left_out": left_out}, make)


def read_corrections(path: Path, renderer: Renderer) -> Iterator[Demonstration]:
    """Yield users' corrections: the recorded prompt of the corrected reply, and the correction.

    Raises:
        ConfigError: The path is no run's directory, or the template does not render a correction.
    """
    if not path.is_dir():
        raise ConfigError(f"sft.corrections needs the directories of runs, and {path} is none")
    for file in step_files(path).values():
        for line in read_lines(file):
            for index, name, messages in corrections_of(line["metadata"]):
                place = f"{path}, episode {line['session_id']}, correction {name!r}"
                yield _correction(line, index, messages, place, renderer)


def _correction(
    line: Mapping[str, Any], index: int, messages: list[Any], place: str, renderer: Renderer
) -> Demonstration:
    trajectory = decode_trajectory(line)
    turns = [turn for turn in trajectory.turns if turn.index == index]
    if not turns or len(messages) < 2:
        raise ConfigError(f"{place}: there is no reply {index} to correct")
    forms = [escaped(renderer, template_form(message, at)) for at, message in enumerate(messages)]
    reply = reply_ids(renderer, forms[:-1], forms[-1], None)
    prompt = trajectory.prompt_ids(turns[0])
    ids = np.concatenate([prompt, np.array(reply, dtype=np.int32)])
    return demonstration(line["task_id"], place, [(ids, np.arange(len(ids)) >= len(prompt))])
