"""Reads a run's results of `tidegate eval` (`evals/*/results.json`) as plain data that is safe to print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tidegate.viewer.formatting import known, printable


def eval_results(run_dir: Path) -> list[dict[str, Any]]:
    """A row for each held-out set of each evaluation, the newest evaluation first. A file that is missing, or
    not whole yet, is left out."""
    files = [(path.stat().st_mtime, path) for path in run_dir.glob("evals/*/results.json")]
    return [row for _, path in sorted(files, reverse=True) for row in _rows(path)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return
    results = _table(found)
    sampling = _table(results.get("sampling"))
    for name, one in _table(results.get("sets")).items():
        numbers = _table(one)
        yield {
            "directory": printable(f"evals/{path.parent.name}"),
            "target": printable(Path(str(results.get("target") or "")).name),
            "agent": printable(_table(results.get("agent")).get("use") or ""),
            "status": printable(results.get("status") or ""),
            "set": printable(name),
            "temperature": known(sampling.get("temperature")),
            "samples": known(results.get("samples")),
            "tasks": known(numbers.get("tasks")),
            "failed": known(numbers.get("failed")),
            "reward": _interval(numbers.get("reward")),
            "pass": {printable(k): _interval(value) for k, value in _table(numbers.get("pass")).items()},
        }


def _interval(found: object) -> list[float | None]:
    """Mean, low and high end; None where there is no number."""
    numbers = _table(found)
    return [known(numbers.get(name)) for name in ("mean", "low", "high")]


def _table(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
