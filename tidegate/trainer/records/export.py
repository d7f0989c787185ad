"""A run's trajectories for other tools: chats for supervised fine-tuning, or a table of token sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from tidegate.errors import ConfigError, StorageError
from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.trajectories import read_lines, recorded, step_files


def write_sft(run_dir: Path, out: Path, min_reward: float) -> int:
    """Write a line `{"messages", "task_id", "reward", "step"}` for every episode of a batch, or dropped for
    it, whose reward is at least `min_reward`; returns how many.

    `messages` is the conversation's newest branch, the model's last reply included, as the chat formats
    of fine-tuning tools have it. Raises TidegateError where the run has no trajectories or `out` cannot be
    written: then what was there before stays.
    """
    written = 0
    step_files(run_dir)
    with _written(out) as part, part.open("wb") as file:
        for step, line in _episodes(run_dir):
            if line["reward"] is not None and line["reward"] >= min_reward and line["messages"]:
                kept = {name: line[name] for name in ("messages", "task_id", "reward")}
                file.write(orjson.dumps({**kept, "step": step}) + b"\n")
                written += 1
    return written


def write_parquet(run_dir: Path, out: Path) -> int:
    """Write a row for every token sequence of every episode; returns how many.

    Beside what names the episode (step, state, group, slot, task, env, outcome, reward): `input_ids`,
    `trained` (the mask, of episodes that were dropped too; all False where an episode of the batch was left
    out of training), `logprobs` (log μ, 0 where context), `versions` (−1 where context) and
    `advantages`, lists of equal length. Raises ConfigError where pyarrow is missing, TidegateError as
    `write_sft`.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("writing parquet needs pyarrow: pip install 'tidegate[data]'") from None
    schema = _schema(pa)
    written = 0
    files = step_files(run_dir)
    with _written(out) as part, parquet.ParquetWriter(part, schema) as writer:
        for path in files.items():
            rows = list(_rows(*path))
            writer.write_table(pa.Table.from_pylist(rows, schema))
            written += len(rows)
    return written


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Where to write what comes in the place of `out` when it is whole. Raises StorageError."""
    part = out.with_name(f".{out.name}.part")
    try:
        yield part
        part.replace(out)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _schema(pa: Any) -> Any:
    text, whole, real = pa.string(), pa.int32(), pa.float32()
    return pa.schema(
        {
            "step": whole, "state": text, "session_id": text, "group_id": text, "slot": whole,
            "task_id": text, "env": text, "outcome": text, "reward": pa.float64(),
            "input_ids": pa.list_(whole), "trained": pa.list_(pa.bool_()), "logprobs": pa.list_(real),
            "versions": pa.list_(pa.int64()), "advantages": pa.list_(real),
        }
    )  # fmt: skip


def _episodes(run_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for step, path in step_files(run_dir).items():
        for line in read_lines(path):
            yield step, line


def _rows(step: int, path: Path) -> Iterator[dict[str, Any]]:
    for line in read_lines(path):
        trajectory = recorded(line)
        advantage = line.get("turn_advantages", line["advantage"])
        left_out = advantage is None and line["state"] == State.STEPPED
        for row in rows_of(trajectory, 0.0 if advantage is None else advantage):
            yield {
                "step": step,
                "state": line["state"],
                **{name: line[name] for name in ("session_id", "group_id", "slot", "task_id", "env")},
                "outcome": trajectory.outcome.value,
                "reward": trajectory.reward,
                "input_ids": row.ids,
                "trained": row.mask & (not left_out),
                "logprobs": row.logprobs,
                "versions": row.versions,
                "advantages": row.advantages,
            }
