"""Formats results as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidegate.evaluation.gold import GoldSplit

SHOWN = 5


def result_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of an evaluation's `results.json`."""
    sampling = results["sampling"]
    how = f"temperature {sampling['temperature']:g}" if sampling else "the agent's own sampling"
    samples = results["samples"]
    times = "one sample" if samples == 1 else f"{samples} samples"
    yield f"{results['target']}: {results['env']['use']} × {results['agent']['use']}, {times} a task, {how}"
    if results["status"] != "completed":
        yield f"{results['status']}: these are the episodes until then"
    for name, summary in results["sets"].items():
        failed = f", {summary['failed']:,} failed" if summary["failed"] else ""
        yield f"  {name}: {summary['tasks']:,} tasks, {summary['episodes']:,} episodes{failed}"
        yield from _numbers(summary)
    for reason, number in results["failures"].items():
        yield f"  failed {number:,}×: {reason}"


def _numbers(summary: Mapping[str, Any]) -> Iterator[str]:
    if "reward" in summary:
        yield _format("reward", summary["reward"])
    if "reward_if_failures_were_0" in summary:
        yield f"    {'reward if failures were 0':<26}{summary['reward_if_failures_were_0']:.4f}"
    for k, estimate in summary.get("pass", {}).items():
        yield _format(f"pass@{k}", estimate)
    for key in ("reward_by_env", "metrics"):
        for name, value in summary.get(key, {}).items():
            yield f"    {name:<26}{value:.4f}"


def _format(name: str, estimate: Mapping[str, Any]) -> str:
    interval = f"{estimate['level']:.0%} [{estimate['low']:.4f}, {estimate['high']:.4f}]"
    return f"    {name:<26}{estimate['mean']:.4f}   {interval}  {estimate['method']}"


def gold_lines(env: str, splits: Sequence[GoldSplit]) -> Iterator[str]:
    """Yields the lines of the gold answers' results; the last line has the totals."""
    yield f"{env}: every gold answer graded as if an agent had returned it"
    for split in splits:
        yield f"  {split.name:<20}{split.right:>8,} of {split.total:,}"
    misses = [miss for split in splits for miss in split.misses]
    for miss in misses[:SHOWN]:
        yield f"  {miss.task_id}: the answer is {str(miss.answer)[:60]!r}; {miss.why}"
    if len(misses) > SHOWN:
        yield f"  and {len(misses) - SHOWN:,} more"
    yield f"{sum(split.right for split in splits):,} of {sum(split.total for split in splits):,}"


def gold_results(env: Mapping[str, Any], splits: Sequence[GoldSplit]) -> dict[str, Any]:
    """Returns the gold answers' results for JSON."""
    extractors: dict[str, int] = {}
    for split in splits:
        for name, number in split.extractors.items():
            extractors[name] = extractors.get(name, 0) + number
    return {
        "env": dict(env),
        "right": sum(split.right for split in splits),
        "total": sum(split.total for split in splits),
        "splits": [{"name": split.name, "right": split.right, "total": split.total} for split in splits],
        "extractors": extractors,
        "misses": [
            {"task_id": miss.task_id, "answer": miss.answer, "why": miss.why}
            for split in splits
            for miss in split.misses
        ],
    }
