"""`trajectories/`: every episode that was trained on, dropped or failed, as people and tools read it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from tidegate.trainer.batches import Batch
from tidegate.trainer.entries import State
from tidegate.types import Trajectory, Turn


class TrajectoryFiles:
    """Writes `step_N.jsonl` (a batch, and what was dropped for it), `eval_N.jsonl` and `failed.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "trajectories"
        self.directory.mkdir(parents=True, exist_ok=True)

    def batch(self, batch: Batch, advantages: list[list[float]], step: int) -> None:
        trained = [
            {"state": State.STEPPED.value, "advantage": advantage, **readable(trajectory)}
            for group, values in zip(batch.groups, advantages, strict=True)
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

    def failure(self, trajectory: Trajectory, attempt: str) -> None:
        with open(self.directory / "failed.jsonl", "ab") as file:
            file.write(
                orjson.dumps({"state": State.FAILED.value, "attempt": attempt, **readable(trajectory)})
                + b"\n"
            )

    def _write(self, name: str, lines: list[dict[str, Any]]) -> None:
        part = self.directory / f"{name}.part"
        part.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        part.replace(self.directory / name)


def readable(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON, tokens included."""
    wire = trajectory.to_wire()
    wire["turns"] = [_turn(turn) for turn in trajectory.turns]
    return wire


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "parent": turn.parent,
        "delta_ids": turn.delta_ids.tolist(),
        "output_ids": turn.output_ids.tolist(),
        "logprobs": [round(float(one), 6) for one in turn.logprobs],
        "version_spans": [list(span) for span in turn.version_spans],
        "finish_reason": turn.finish_reason,
        "temperature": turn.temperature,
        "delivered": turn.delivered,
        "kv_version": turn.kv_version,
        "cached_tokens": turn.cached_tokens,
        "branch": turn.branch,
        "output_mask": None if turn.output_mask is None else turn.output_mask.tolist(),
        "parse": turn.parse,
        "started": round(turn.started, 4),
        "seconds": round(turn.seconds, 4),
    }
