"""`trajectories/`: files of every episode that was trained on, dropped or failed.

A line holds a complete trajectory, from which `decode_trajectory` restores ids and logprobs exactly. A step's
file is written before the ledger records the step, so that a resume finds the tokens of every group that it
restores. A resume moves the files of discarded steps to `taken_back/`.

`failed.jsonl` and `stale.jsonl` grow during the whole run. Once one has `PART_BYTES`, the next write begins
its next part, `failed.2.jsonl`; nothing is appended to a part that is followed by another.

A group that is dropped while a batch is assembled is appended to the file of the next step at once, so that
it is recorded even if that step is never taken. The step then adds its batch to the file.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import zstandard

from tidegate import failpoints
from tidegate.errors import TidegateError
from tidegate.service import exact
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.batch.credit import Advantage
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.jsonl import PART_BYTES, drop_torn_line, naming, nth_part, parts, sync
from tidegate.trainer.records.writer import FileWriter
from tidegate.turn import Turn
from tidegate.types import Group, Trajectory, array_bytes, element_type, fields_of

LONGEST_ANSWER = 2_000
"""Limit of a gold answer in a line: characters of its text, or of its JSON if it is not text."""


class TrajectoryFiles:
    """Writes `step_N.jsonl` (a batch and the groups dropped for it), `eval_N.jsonl`, and `failed.jsonl` and
    `stale.jsonl` (episodes that were never leased), which have parts like the ledger."""

    def __init__(self, run_dir: Path, part_bytes: int = PART_BYTES) -> None:
        self.directory = run_dir / "trajectories"
        self.erased: set[str] = set()
        """Ids of groups that are never written."""
        self._begun: Path | None = None
        """File of the next step, if it is known whether it has dropped groups."""
        self._dropped: set[str] = set()
        """Ids of the groups in that file."""
        self._discarded = self.directory / "taken_back"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._part_bytes = part_bytes
        first = {state: self.directory / f"{state}.jsonl" for state in (State.FAILED, State.STALE)}
        self._unleased = {state: parts(path) or [path] for state, path in first.items()}
        """Parts of the files of episodes that were never leased; the last one is appended to."""
        for *_, last in self._unleased.values():
            drop_torn_line(last)

    def drop(self, group: Group, state: State, step: int) -> None:
        """Append a group that was dropped while the batch of `step` is assembled to that step's file."""
        self._begin(path := self._of_step(step))
        if group.id in self.erased or group.id in self._dropped:
            return
        lines = _dropped_lines(group, state, untrained=False)
        with failpoints.around("trajectories.dropped"), naming(path), open(path, "ab") as file:
            file.write(b"".join(map(_line, lines)))
        self._dropped.add(group.id)

    def batch(self, batch: Batch, step: int) -> None:
        """Add a step's batch, and the groups that were dropped for it and are not written, to its file."""
        self._begin(path := self._of_step(step))
        before = path.read_bytes() if self._dropped else b""
        trained = [
            {"state": State.STEPPED.value, **_advantage_fields(advantage), **encode_trajectory(trajectory)}
            for group, values in zip(batch.groups, batch.advantages, strict=True)
            for trajectory, advantage in zip(group.trajectories, values, strict=True)
        ]
        dropped = [
            line
            for group, state in batch.dropped
            if group.id not in self._dropped
            for line in _dropped_lines(group, state, untrained=group.id in batch.untrained)
        ]
        self._write(path.name, [*trained, *dropped], before)
        self._begun, self._dropped = None, set()

    def _of_step(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}.jsonl"

    def _begin(self, path: Path) -> None:
        """Find the dropped groups in the file of the next step, which an earlier start may have begun."""
        if self._begun != path:
            drop_torn_line(path)
            begun = path.exists() and not _has_batch(path)
            self._begun = path
            self._dropped = {line["group_id"] for line in read_lines(path)} if begun else set()

    def evaluation(self, step: int, episodes: Iterable[tuple[str, str, Trajectory]]) -> None:
        """Write an evaluation's episodes: (evaluation set, mode, trajectory)."""
        lines = [
            {"eval_set": eval_set, "mode": mode, **encode_trajectory(trajectory)}
            for eval_set, mode, trajectory in episodes
        ]
        self._write(f"eval_{step:06d}.jsonl", lines)

    def move_discarded(self, after: int, epoch: int) -> None:
        """Move the files of the steps after `after`, which the start `epoch` discards, to `taken_back/`.

        The file of the next step stays if it has dropped groups only: they are not undone.
        """
        for path in self.directory.glob("step_*.jsonl"):
            number = int(path.stem.removeprefix("step_"))
            if number > after + 1 or (number == after + 1 and _has_batch(path)):
                self._discarded.mkdir(exist_ok=True)
                with failpoints.around("trajectories.taken_back"):
                    path.replace(self._discarded / f"{epoch}_{path.name}")

    def read_discarded(self, names: Collection[str]) -> dict[str, Group]:
        """Return the named groups that were in batches of discarded steps."""
        members: dict[str, dict[str, Trajectory]] = {}
        for path in sorted(self._discarded.glob("*.jsonl")) if names else ():
            for line in read_lines(path):
                if line["state"] == State.STEPPED.value and line["group_id"] in names:
                    members.setdefault(line["group_id"], {})[line["session_id"]] = decode_trajectory(line)
        return {
            name: Group(name, next(iter(by_session.values())).task_id, list(by_session.values()))
            for name, by_session in members.items()
        }

    def append(self, trajectories: Iterable[Trajectory], state: State) -> None:
        """Append episodes that failed, or became stale before their group was leased, to one part."""
        lines = [
            {"state": state.value, "attempt": one.metadata.get("attempt"), **encode_trajectory(one)}
            for one in trajectories
            if one.group_id not in self.erased
        ]
        if not lines:
            return
        path = self._growing_part(state)
        try:
            with failpoints.around(f"trajectories.{state}"), naming(path), open(path, "ab") as file:
                file.write(b"".join(map(_line, lines)))
        except OSError:
            drop_torn_line(path)  # the next write may be to another part, and then this one stays as it is
            raise

    def _growing_part(self, state: State) -> Path:
        """Return the part that is appended to: the last one, or a new one if that is full."""
        found = self._unleased[state]
        if found[-1].exists() and found[-1].stat().st_size >= self._part_bytes:
            found.append(nth_part(found[0], len(found) + 1))
        return found[-1]

    async def erase(self, groups: Collection[str], writer: FileWriter) -> None:
        """Remove the episodes of these groups from every file, and never write them again. Idempotent.

        Args:
            groups: Ids of the groups.
            writer: Runs all other calls that write these files.
        """
        self.erased.update(groups)
        names = frozenset(groups)
        # Listed by the writer: a write that began before the line above is in the list.
        closed, growing = await writer.run(self._closed)
        await asyncio.to_thread(_erase, closed, names)
        await writer.run(lambda: _erase(filter(Path.exists, growing), names))

    def _closed(self) -> tuple[list[Path], list[Path]]:
        """Return the files to which nothing is appended, and the others.

        The newest step's file is among the others while it has no batch, also after a resume.
        """
        growing = [*(last for *_, last in self._unleased.values()), *filter(None, [self._begun])]
        newest = max(self.directory.glob("step_*.jsonl"), default=None)
        if newest is not None and newest != self._begun and not _has_batch(newest):
            growing.append(newest)
        closed = set(self.directory.glob("*.jsonl")).difference(growing)
        return [*closed, *self._discarded.glob("*.jsonl")], growing

    def _write(self, name: str, lines: list[dict[str, Any]], before: bytes = b"") -> None:
        lines = [line for line in lines if line["group_id"] not in self.erased]
        part = self.directory / f"{name}.part"
        with failpoints.around(f"trajectories.{name.partition('_')[0]}"), naming(part):
            part.write_bytes(before + b"".join(map(_line, lines)))
            sync(part)  # before its name: the loss of the machine must not leave a torn file of a step
            part.replace(self.directory / name)
            sync(self.directory)


def _dropped_lines(group: Group, state: State, *, untrained: bool) -> list[dict[str, Any]]:
    more = {"untrained": True} if untrained else {}
    return [
        {"state": state.value, "advantage": None, **more, **encode_trajectory(trajectory)}
        for trajectory in group.trajectories
    ]


def _has_batch(path: Path) -> bool:
    """Return whether a step's file has more than groups that were dropped for it."""
    return any(line["state"] == State.STEPPED.value or line.get("untrained") for line in read_lines(path))


_GROUP_IDS = re.compile(rb'"group_id":\s*"([^"\\]*)"')  # ids have no character that JSON escapes


def _erase(paths: Iterable[Path], groups: Collection[str]) -> None:
    """Remove the lines of these groups from files, each of which is replaced if it has any."""
    # As they stand in a line: a run's files may have gigabytes, and only lines with such a name are parsed.
    names = {json.dumps(group, ensure_ascii=False)[1:-1].encode() for group in groups}
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True)
        named = [line for line in lines if not names.isdisjoint(_GROUP_IDS.findall(line))]
        erased = {line for line in named if orjson.loads(line).get("group_id") in groups}
        if erased:
            part = path.with_name(f"{path.name}.part")
            with failpoints.around("trajectories.erased"), naming(part):
                part.write_bytes(b"".join(line for line in lines if line not in erased))
                sync(part)
                part.replace(path)


def bounded_answer(answer: Any) -> Any:
    """Return a gold answer for a line: the value, or if it is too long its start and the omitted length.

    Values without a JSON form (sets, keys that are not text) become text.
    """
    try:
        encoded = orjson.dumps(answer, default=str)
    except orjson.JSONEncodeError:
        encoded = _exact_or_text(answer)
    text = answer if isinstance(answer, str) else encoded.decode()
    if len(text) <= LONGEST_ANSWER:
        return exact.loads(encoded)
    return f"{text[:LONGEST_ANSWER]} … ({len(text) - LONGEST_ANSWER:,} more characters)"


def _exact_or_text(answer: Any) -> bytes:
    with contextlib.suppress(TypeError, ValueError):
        if exact.loads(encoded := exact.dumps(answer)) == answer:
            return encoded
    return orjson.dumps(repr(answer))


def encode_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as the content of a line; numpy arrays stay as they are."""
    wire = fields_of(trajectory)
    wire["turns"] = [_encode_turn(turn) for turn in trajectory.turns]
    wire["tool_calls"] = [fields_of(call) for call in trajectory.tool_calls]
    if not trajectory.policy_rewards:
        del wire["policy_rewards"]
    return wire


def decode_trajectory(line: Mapping[str, Any]) -> Trajectory:
    """Restore the trajectory of a line of `trajectories/`, bit for bit.

    Fields that this version does not know are left out. Raises msgspec.ValidationError, a
    ValueError, if a field is missing or has a value of another type.
    """
    return msgspec.convert(line, Trajectory, dec_hook=_array)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of `trajectories/`. Raises TidegateError if one is damaged.

    The last line may be incomplete in a file without a batch, to which groups are appended.
    """
    has_batch = False
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                content = exact.loads(line)
            except ValueError as error:
                if not has_batch and not line.endswith(b"\n"):
                    return
                raise TidegateError(f"{path}, line {number}: not JSON: {error}") from None
            has_batch = has_batch or content.get("state") == State.STEPPED.value
            yield content


def step_files(run_dir: Path) -> dict[int, Path]:
    """Return the files of a run's batches by step, in order. Raises TidegateError if there are none.

    The last one may be of a step that is not taken yet, with groups that were dropped for it.
    """
    files = {int(path.stem[5:]): path for path in (run_dir / "trajectories").glob("step_*.jsonl")}
    if not files:
        raise TidegateError(f"{run_dir} has no trajectories; is this the directory of a run that trained?")
    return dict(sorted(files.items()))


def _line(content: Mapping[str, Any]) -> bytes:
    return exact.dumps(content, orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def _advantage_fields(advantage: Advantage) -> dict[str, Any]:
    """Return the fields of an episode's advantage.

    `advantage` is the first turn's, or None if the episode was not trained on. `turn_advantages` has those of
    all turns if they differ.
    """
    if not isinstance(advantage, list):
        return {"advantage": advantage}
    return {"advantage": advantage[0], "turn_advantages": advantage}


def _encode_turn(turn: Turn) -> dict[str, Any]:
    line = fields_of(turn)
    for name, value in line.items():
        if isinstance(value, np.ndarray):
            # orjson writes contiguous arrays only, and these may be views of a longer one.
            line[name] = _pack(value) if name in _PACKED else np.ascontiguousarray(value)
    line["version_spans"] = [list(span) for span in turn.version_spans]
    line["started"], line["seconds"] = round(turn.started, 4), round(turn.seconds, 4)
    if not turn.policy:
        del line["policy"]
    return line


_PACKED = ("top_ids", "top_logprobs", "kept_ids", "kept_counts", "experts")
"""Arrays of a turn that a line holds compressed, as text (`_pack`)."""


def _pack(array: np.ndarray) -> str:
    """Returns an array's compressed bytes as text, which takes a third of its numbers in JSON."""
    return base64.b64encode(zstandard.compress(array_bytes(array), 1)).decode()


def _array(kind: Any, value: Any) -> np.ndarray:
    """Returns an array of a type such as `Ids`, from its numbers or its text."""
    if isinstance(value, str):
        return np.frombuffer(zstandard.decompress(base64.b64decode(value)), element_type(kind))
    return np.array(value, element_type(kind))
