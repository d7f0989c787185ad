"""Output of the benchmarks: a table, then with `--json` one object; exits non-zero if a check fails."""

from __future__ import annotations

import json
import operator
import os
import platform
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
