"""Versions and publishes of a run, read from its ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.ledger.versions import VersionRecord, version_records

_OF_VERSIONS = ("started", "publishing", "promoted", "rolled_back", "ended")


@dataclass(slots=True)
class VersionHistory:
    """The ledger's entries about versions, and the newest step."""

    entries: list[LedgerEntry] = field(default_factory=list)
    step: int = 0
    """The newest step that was taken since the newest of `entries`; 0: none."""
    stepped_at: float = 0.0

    def read(self, lines: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yields each line after it has been taken in."""
        for line in lines:
            if line.get("kind") == "run" and line.get("event") in _OF_VERSIONS:
                self.entries.append(cast(LedgerEntry, line))
                self.step = 0
            elif line.get("kind") == "group" and line.get("state") == "stepped":
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    self.step, self.stepped_at = int(line["step"]), float(line["time"])
            yield line

    def versions(self) -> list[VersionRecord]:
        """Returns the versions in the order of their numbers; none if an entry is damaged."""
        try:
            return version_records(self.entries)
        except (KeyError, TypeError):
            return []

    def publish_waits_since(self, trainer: Mapping[str, Any]) -> float | None:
        """Returns since when (Unix time) a publish waits for conversations; None if none does.

        Args:
            trainer: The run's settings in the section `trainer`.
        """
        interval = trainer.get("publish_interval", 1)
        due = isinstance(interval, int) and interval > 0
        due = due and (self.step % interval == 0 or self.step == trainer.get("steps"))
        waits = trainer.get("max_stale_share") is not None and self.step > 0 and due
        return self.stepped_at if waits else None
