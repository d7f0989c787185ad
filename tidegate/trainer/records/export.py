"""Exports a run's trajectories: as chats, as a table of token sequences, or for other trainers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tidegate.errors import ConfigError, StorageError
from tidegate.program import advise_extra
from tidegate.service import exact
from tidegate.trainer.batch.rows import TrainingSequence, rows_of
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.formats import FORMATS
from tidegate.trainer.records.trajectories import decode_trajectory, read_lines, step_files


class _OfPolicy(Protocol):
    @property
    def policy(self) -> str | None: ...


T = TypeVar("T", bound=_OfPolicy)


def write_sft(run_dir: Path, out: Path, min_reward: float) -> int:
    """Write the episodes with at least a given reward as JSONL: `messages`, `task_id`, `reward`, `step`.

    `messages` is the conversation's newest branch with the model's last reply, in the chat format of
    fine-tuning tools. Episodes that were dropped for a batch are included.

    Args:
        run_dir: Directory of the run.
        out: File to write; it stays unchanged if an error occurs.
        min_reward: Least reward of an episode.

    Returns:
        Number of lines.

    Raises:
        TidegateError: The run has no trajectories, or `out` cannot be written.
    """
    written = 0
    # Raises without trajectories, before `out` is replaced by an empty file.
    step_files(run_dir)
    with _replacing(out) as part, part.open("wb") as file:
        for step, line in _episodes(run_dir):
            if line["reward"] is not None and line["reward"] >= min_reward and line["messages"]:
                chat = {name: line[name] for name in ("messages", "task_id", "reward")}
                file.write(exact.dumps({**chat, "step": step}) + b"\n")
                written += 1
    return written


def write_corrections(run_dir: Path, out: Path) -> int:
    """Write users' corrections as JSONL: `messages`, which end in the corrected reply, `name` and `step`.

    They are of conversations that the trainer accepted.

    Args:
        run_dir: Directory of the run.
        out: File to write; it stays unchanged if an error occurs.

    Returns:
        Number of lines.

    Raises:
        TidegateError: As in `write_sft`.
    """
    written = 0
    with _replacing(out) as part, part.open("wb") as file:
        for step, line in _episodes(run_dir):
            for _, name, messages in corrections_of(line["metadata"]):
                file.write(exact.dumps({"messages": messages, "name": name, "step": step}) + b"\n")
                written += 1
    return written


def corrections_of(metadata: Mapping[str, Any]) -> Iterator[tuple[int, str, list[Any]]]:
    """Yield the turn and the name of each feedback with a correction, and the chat, which ends in it.

    Groups that clients form have metadata of their own, which may look like anything.
    """
    notes = metadata.get("feedback")
    for key, note in notes.items() if isinstance(notes, dict) else ():
        turn, _, name = key.partition(".")
        if isinstance(note, dict) and isinstance(note.get("correction"), list) and turn.isdecimal():
            yield int(turn), name, note["correction"]


def write_parquet(run_dir: Path, out: Path) -> int:
    """Write a Parquet table with a row per token sequence of every episode.

    Columns are those of the episode (step, state, group, slot, task, env, outcome, reward and its parts)
    and lists of equal length: `input_ids`, `trained` (the mask, also of dropped episodes; all False for an
    episode of the batch that was not trained on), `logprobs` (log μ, 0 for context), `versions` (−1 for
    context), `advantages`, and, null unless they were recorded, `top_ids` and `top_logprobs`: of each token
    the list of the engine's likeliest ids, and log μ of them; and `kept_counts`: the number of ids that
    top-p, top-k and min-p kept (0: all), which `kept_ids` lists; and `policy`, null in a run with one, whose
    reward `policy_rewards` has if it is not the episode's.

    Returns:
        Number of rows.

    Raises:
        ConfigError: pyarrow is not installed.
        TidegateError: As in `write_sft`.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"writing parquet needs pyarrow: {advise_extra('data')}") from None
    schema = _schema(pa)
    written = 0
    files = step_files(run_dir)
    with _replacing(out) as part, parquet.ParquetWriter(part, schema) as writer:
        for path in files.items():
            rows = list(_rows(*path))
            writer.write_table(pa.Table.from_pylist(rows, schema))
            written += len(rows)
    return written


def write_format(run_dir: Path, out: Path, name: str, policy: str | None = None) -> int:
    """Write the episodes of the batches as JSONL in a format of FORMATS: a row per token sequence.

    ATIF has a document per episode, of dropped ones, too.

    Args:
        run_dir: Directory of the run.
        out: File to write; it stays unchanged if an error occurs.
        name: Name of the format.
        policy: Policy whose sequences are written, with its rewards; None: the run has one.

    Returns:
        Number of lines.

    Raises:
        ConfigError: The run has several policies and none is named, or not this one.
        TidegateError: As in `write_sft`.
    """
    made, written = FORMATS[name], 0
    step_files(run_dir)
    with _replacing(out) as part, part.open("wb") as file:
        for _, line in _episodes(run_dir):
            if made.batches_only and line["state"] != State.STEPPED:
                continue
            found = sequences_of(line)
            if made.batches_only:
                found = of_policy(found, policy, "--policy")
                line = {**line, "reward": reward_of(line, policy)}
            for row in made.rows(line, found):
                file.write(exact.dumps(row) + b"\n")
                written += 1
    return written


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `out` on success. Raises StorageError."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")  # of this process, as another may export, too
    try:
        yield part
        part.replace(out)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _schema(pa: Any) -> Any:
    text, integer, real = pa.string(), pa.int32(), pa.float32()
    return pa.schema(
        {
            "step": integer, "state": text, "session_id": text, "group_id": text, "slot": integer,
            "task_id": text, "env": text, "outcome": text, "reward": pa.float64(),
            "reward_parts": pa.map_(text, pa.float64()),
            "policy": text, "policy_rewards": pa.map_(text, pa.float64()),
            "input_ids": pa.list_(integer), "trained": pa.list_(pa.bool_()), "logprobs": pa.list_(real),
            "versions": pa.list_(pa.int64()), "advantages": pa.list_(real),
            "top_ids": pa.list_(pa.list_(integer)), "top_logprobs": pa.list_(pa.list_(pa.float16())),
            "kept_ids": pa.list_(integer), "kept_counts": pa.list_(integer),
        }
    )  # fmt: skip


def _episodes(run_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for step, path in step_files(run_dir).items():
        for line in read_lines(path):
            yield step, line


def is_left_out(line: Mapping[str, Any]) -> bool:
    """Return whether the episode of a line was in a step's batch, but was not trained on."""
    return line["advantage"] is None and bool(line["state"] == State.STEPPED)


def sequences_of(line: Mapping[str, Any]) -> list[TrainingSequence]:
    """Return the token sequences of a line, with the mask with which they were, or would be, trained on.

    Raises TrainingError if a turn of it was recorded wrongly.
    """
    advantage = line.get("turn_advantages", line["advantage"])
    rows = rows_of(decode_trajectory(line), 0.0 if advantage is None else advantage)
    return [replace(row, mask=row.mask & (not is_left_out(line))) for row in rows]


def of_policy(rows: Sequence[T], policy: str | None, setting: str) -> list[T]:
    """Returns the token sequences of a policy: all, in a run with one.

    Args:
        rows: Sequences with `policy`, which is empty or None in a run with one.
        policy: Name of the policy; None: there is one.
        setting: How it is set, for the error.

    Raises:
        ConfigError: A sequence is of a policy though none is named, or of none though one is.
    """
    for row in rows:
        if bool(row.policy) != bool(policy):
            there = f"of policy {row.policy!r}, one of several" if row.policy else "of a run with one policy"
            what = f"name one with {setting}" if row.policy else f"leave out {setting}"
            raise ConfigError(f"the episodes are {there}: {what}")
    return [row for row in rows if (row.policy or None) == policy]


def reward_of(line: Mapping[str, Any], policy: str | None) -> Any:
    """Returns the reward of a policy's turns in the episode of a line."""
    return (line.get("policy_rewards") or {}).get(policy, line["reward"])


def _rows(step: int, path: Path) -> Iterator[dict[str, Any]]:
    for line in read_lines(path):
        for row in sequences_of(line):
            yield {
                "step": step,
                "state": line["state"],
                **{name: line[name] for name in ("session_id", "group_id", "slot", "task_id", "env")},
                "outcome": line["outcome"],
                "reward": line["reward"],
                "reward_parts": line["reward_parts"],
                "policy": row.policy or None,
                "policy_rewards": line.get("policy_rewards"),
                "input_ids": row.ids,
                "trained": row.mask,
                "logprobs": row.logprobs,
                "versions": row.versions,
                "advantages": row.advantages,
                "top_ids": None if row.sampler_ids is None else [*row.sampler_ids],
                "top_logprobs": None if row.sampler_listed is None else [*row.sampler_listed],
                "kept_ids": row.kept_ids,
                "kept_counts": row.kept_counts,
            }
