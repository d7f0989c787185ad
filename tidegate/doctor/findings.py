"""Results of checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    """Training is possible, but will be worse or slower."""
    ERROR = "error"
    """Training would fail or not learn."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. `code` is stable and machine-readable; `fix` is the remedy."""

    check: str
    level: Level
    code: str
    text: str
    fix: str = ""


Tell = Callable[[Finding], None]
"""Called with each finding as soon as it exists."""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, "ok", text)


def note(check: str, code: str, text: str) -> Finding:
    return Finding(check, Level.NOTE, code, text)


def warning(check: str, code: str, text: str, fix: str = "") -> Finding:
    return Finding(check, Level.WARNING, code, text, fix)


def error(check: str, code: str, text: str, fix: str = "") -> Finding:
    return Finding(check, Level.ERROR, code, text, fix)


def failed(findings: list[Finding]) -> bool:
    return any(finding.level is Level.ERROR for finding in findings)
