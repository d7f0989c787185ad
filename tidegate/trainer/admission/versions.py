"""Policy versions of a run: the live one, the reserved ones, and those whose tokens may be trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidegate.errors import LedgerError
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger.entries import LedgerEntry, entry


class PolicyVersions:
    """Versions of one run, and the staleness bound on their tokens.

    Args:
        rules: Limits to enforce.
        record: Receives every ledger entry, in order.
        live: Version that is live.
    """

    def __init__(self, rules: Rules, record: Callable[[LedgerEntry], None], live: int) -> None:
        self.live = live
        """Version that the engines serve; also the trainer's version."""
        self.reserved = live
        """Newest version number that was given out."""
        self.publishing = False
        """Whether a reserved version is about to go live."""
        self.abandoned: set[int] = set()
        """Versions whose tokens are not trained on: rolled back, or published after a checkpoint that a later
        start resumed from."""
        self._rules = rules
        self._record = record

    def staleness(self, oldest: int | None) -> int | None:
        """Versions between the trainer and the oldest token; None if unknown."""
        return None if oldest is None or oldest > self.live else self.live - oldest

    def admissible(self, oldest: int | None, newest: int | None = None) -> bool:
        """Whether tokens of the versions `oldest` to `newest` may be trained on now."""
        staleness = self.staleness(oldest)
        bound = self._rules.max_staleness
        if oldest is None or staleness is None or (bound is not None and staleness > bound):
            return False
        last = oldest if newest is None else newest
        return not any(oldest <= version <= last for version in self.abandoned)

    def exceeds_bound(self, version: int, oldest: int | None) -> bool:
        """Whether a group with tokens of `oldest` will exceed the bound once `version` is live."""
        bound = self._rules.max_staleness
        return bound is not None and oldest is not None and version - oldest > bound

    def reserve(self, step: int, *, candidate: bool = False) -> int:
        """Reserve the next version number for the weights after `step`.

        The ledger records it before any engine receives it, so that no restart can reuse it. A `candidate`
        is tested first; groups may start meanwhile.
        """
        self.reserved += 1
        self.publishing = not candidate
        tested = {"candidate": True} if candidate else {}
        self._record(entry("run", "publishing", version=self.reserved, step=step, **tested))
        return self.reserved

    def promote(self, version: int, step: int, why: str, figures: Mapping[str, float]) -> None:
        """Record that a candidate goes live now."""
        self.publishing = True
        self._record(entry("run", "promoted", version=version, step=step, why=why, **figures))

    def roll_back(self, version: int, to: int, step: int, why: str, figures: Mapping[str, float]) -> None:
        """Abandon the versions after `to` up to `version`."""
        self._record(entry("run", "rolled_back", version=version, to=to, step=step, why=why, **figures))
        self.abandoned |= set(range(to + 1, version + 1))

    def mark_live(self, version: int) -> None:
        """Record that `version` is live on the engines; it is now the trainer's version."""
        if not self.live < version <= self.reserved:
            raise LedgerError(
                f"version {version} cannot go live after {self.live}; {self.reserved} was reserved"
            )
        self.live = version
        self.publishing = False
