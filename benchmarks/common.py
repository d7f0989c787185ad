"""What benchmarks share: command line, directory, table, one object with `--json`, exit code of checks."""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Check:
    """A claim: `value op goal`."""

    name: str
    value: float | None
    op: str
    goal: float

    @property
    def holds(self) -> bool:
        return self.value is not None and bool(OPERATORS[self.op](self.value, self.goal))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`; the description is printed as it stands."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    return parser


@contextlib.contextmanager
def place(keep: Path | None, name: str) -> Iterator[Path]:
    """The directory of a benchmark's files: `keep`, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"tidegate-{name}-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def machine() -> dict[str, Any]:
    """Description of the machine."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "os": platform.system()}


def report(results: list[dict[str, Any]], checks: list[Check], *, as_json: bool) -> int:
    """Prints results and checks; returns the exit code."""
    for result in results:
        print("  ".join(f"{key}={_short(value)}" for key, value in result.items()))
    for check in checks:
        verdict = "passed" if check.holds else "FAILED"
        print(f"{check.name:<36}{_short(check.value):>10} {check.op} {check.goal:<10g}{verdict}")
    if as_json:
        rows = [asdict(check) for check in checks]
        print(json.dumps({"machine": machine(), "results": results, "checks": rows}))
    return 0 if all(check.holds for check in checks) else 1


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
