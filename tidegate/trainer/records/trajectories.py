"""`trajectories/`: every episode that was trained on, dropped or failed, as people and tools read it.

A line holds all of a trajectory, ids and logprobs exactly: `recorded` reads it back as it was. A step's file
is there before the ledger says that the step was taken, so that a resume finds the tokens of every group
that it puts back. It moves the files of steps that are lost to `taken_back/`, out of the way of the steps
that take their place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tidegate import failpoints
from tidegate.errors import TidegateError
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.batch.credit import Advantage
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.jsonl import drop_torn_line
from tidegate.types import Group, Outcome, Trajectory, Turn, VersionSpan

LONGEST_ANSWER = 2_000
"""Characters of a gold answer's JSON (of a text: its own) that a line holds."""


class TrajectoryFiles:
    """Writes `step_N.jsonl` (a batch, and what was dropped for it), `eval_N.jsonl`, and what was never
    leased: `failed.jsonl` and `stale.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "trajectories"
        self._aside = self.directory / "taken_back"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lost = {state: self.directory / f"{state}.jsonl" for state in (State.FAILED, State.STALE)}
        for path in self._lost.values():
            drop_torn_line(path)

    def batch(self, batch: Batch, step: int) -> None:
        trained = [
            {"state": State.STEPPED.value, **_credited(advantage), **readable(trajectory)}
            for group, values in zip(batch.groups, batch.advantages, strict=True)
            for trajectory, advantage in zip(group.trajectories, values, strict=True)
        ]
        dropped = [
            {"state": state.value, "advantage": None, **readable(trajectory)}
            for group, state in batch.dropped
            for trajectory in group.trajectories
        ]
        self._write(f"step_{step:06d}.jsonl", [*trained, *dropped])

    def evaluation(self, step: int, episodes: Iterable[tuple[str, str, Trajectory]]) -> None:
        """`episodes` are (evaluation set, mode, trajectory)."""
        lines = [
            {"eval_set": eval_set, "mode": mode, **readable(trajectory)}
            for eval_set, mode, trajectory in episodes
        ]
        self._write(f"eval_{step:06d}.jsonl", lines)

    def take_back(self, after: int, epoch: int) -> None:
        """Set the files of all steps after `after` aside, as the run's start `epoch` undoes those steps."""
        for path in self.directory.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > after:
                self._aside.mkdir(exist_ok=True)
                with failpoints.around("trajectories.taken_back"):
                    path.replace(self._aside / f"{epoch}_{path.name}")

    def taken_back(self, names: Collection[str]) -> dict[str, Group]:
        """The groups of these names that were members of batches of steps that are lost."""
        members: dict[str, dict[str, Trajectory]] = {}
        for path in sorted(self._aside.glob("*.jsonl")) if names else ():
            for line in read_lines(path):
                if line["state"] == State.STEPPED.value and line["group_id"] in names:
                    members.setdefault(line["group_id"], {})[line["session_id"]] = recorded(line)
        return {
            name: Group(name, next(iter(found.values())).task_id, list(found.values()))
            for name, found in members.items()
        }

    def lost(self, trajectory: Trajectory, state: State) -> None:
        """Append an episode that failed, or that went stale before its group was leased."""
        attempt = trajectory.metadata.get("attempt")
        with failpoints.around(f"trajectories.{state}"), open(self._lost[state], "ab") as file:
            file.write(_line({"state": state.value, "attempt": attempt, **readable(trajectory)}))

    def _write(self, name: str, lines: list[dict[str, Any]]) -> None:
        part = self.directory / f"{name}.part"
        with failpoints.around(f"trajectories.{name.partition('_')[0]}"):
            part.write_bytes(b"".join(map(_line, lines)))
            part.replace(self.directory / name)


def bounded_answer(answer: Any) -> Any:
    """A gold answer as a line holds it: the value, or the start of its text and how much was cut.

    Values without a JSON form (sets, 2**70, keys that are not text) become text.
    """
    try:
        written = orjson.dumps(answer, default=str)
    except orjson.JSONEncodeError:
        answer = repr(answer)
        written = orjson.dumps(answer)
    text = answer if isinstance(answer, str) else written.decode()
    if len(text) <= LONGEST_ANSWER:
        return orjson.loads(written)
    return f"{text[:LONGEST_ANSWER]} … ({len(text) - LONGEST_ANSWER:,} more characters)"


def readable(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as what goes into a line; numbers of numpy stay so."""
    wire = trajectory.to_wire()
    wire["turns"] = [_turn(turn) for turn in trajectory.turns]
    return wire


def recorded(line: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a line of `trajectories/`, bit for bit."""
    known = {field.name for field in fields(Trajectory)}
    wire = {name: value for name, value in line.items() if name in known}
    wire["turns"] = [_turn_of(turn) for turn in wire["turns"]]
    return Trajectory(**{**wire, "outcome": Outcome(wire["outcome"])})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of a file of `trajectories/`. Raises TidegateError for one that is damaged."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TidegateError(f"{path}, line {number}: not JSON: {error}") from None


def step_files(run_dir: Path) -> dict[int, Path]:
    """The batches of a run by their step, in order; raises TidegateError where there is none."""
    found = {int(path.stem[5:]): path for path in (run_dir / "trajectories").glob("step_*.jsonl")}
    if not found:
        raise TidegateError(f"{run_dir}: no trajectories there; is this the directory of a run that trained?")
    return dict(sorted(found.items()))


def _line(content: Mapping[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def _credited(advantage: Advantage) -> dict[str, Any]:
    """An episode's advantage is its first turn's; None: it was not trained on. Where single turns were
    rewarded `turn_advantages` has all of them."""
    if not isinstance(advantage, list):
        return {"advantage": advantage}
    return {"advantage": advantage[0], "turn_advantages": advantage}


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "parent": turn.parent,
        "delta_ids": np.ascontiguousarray(turn.delta_ids, dtype=np.int32),
        "output_ids": np.ascontiguousarray(turn.output_ids, dtype=np.int32),
        "logprobs": np.ascontiguousarray(turn.logprobs, dtype=np.float32),
        "version_spans": [list(span) for span in turn.version_spans],
        "finish_reason": turn.finish_reason,
        "temperature": turn.temperature,
        "delivered": turn.delivered,
        "kv_version": turn.kv_version,
        "cached_tokens": turn.cached_tokens,
        "branch": turn.branch,
        "output_mask": None if turn.output_mask is None else turn.output_mask.tolist(),
        "parse": turn.parse,
        "exempt": turn.exempt,
        "structured": turn.structured,
        "reward": turn.reward,
        "started": round(turn.started, 4),
        "seconds": round(turn.seconds, 4),
    }


def _turn_of(line: Mapping[str, Any]) -> Turn:
    mask = line["output_mask"]
    return Turn(
        **{
            **line,
            "delta_ids": np.array(line["delta_ids"], dtype=np.int32),
            "output_ids": np.array(line["output_ids"], dtype=np.int32),
            "logprobs": np.array(line["logprobs"], dtype=np.float32),
            "version_spans": tuple(VersionSpan(*span) for span in line["version_spans"]),
            "output_mask": None if mask is None else np.array(mask, dtype=np.uint8),
        }
    )
