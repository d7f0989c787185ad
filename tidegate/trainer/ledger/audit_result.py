"""Result of an audit: the counts of groups and attempts by state, and the inconsistencies found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tidegate.trainer.ledger.entries import ENDED, State


@dataclass(slots=True)
class Audit:
    """Result of an audit. `findings` is empty if the ledger is consistent."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    versions: int = 0
    trained_tokens: int = 0
    oldest_staleness: int | None = None
    findings: list[str] = field(default_factory=list)

    @property
    def consistent(self) -> bool:
        return not self.findings


def summary(audit: Audit) -> str:
    """Format the audit as one line: the groups by state, and the verdict."""
    parts = [f"{number} {state}" for state in [*ENDED, State.LIVE] if (number := audit.groups[state.value])]
    return f"audit: {audit.groups.total()} groups = {' + '.join(parts) or '0'}; {_verdict(audit)}"


def table(audit: Audit) -> str:
    """Format the audit as text: one row per state, then the findings."""
    rows = [f"{'state':<12}{'groups':>10}{'attempts':>10}"]
    for state in [*ENDED, State.LIVE]:
        rows.append(f"{state.value:<12}{audit.groups[state.value]:>10}{audit.attempts[state.value]:>10}")
    rows.append(f"{'issued':<12}{audit.groups.total():>10}{audit.attempts.total():>10}")
    rows.append("")
    rows.append(
        f"{audit.steps} steps, {audit.versions} versions published, {audit.trained_tokens} tokens "
        f"trained on, the oldest at staleness {audit.oldest_staleness}"
    )
    rows += [f"inconsistent: {finding}" for finding in audit.findings]
    rows.append(_verdict(audit))
    return "\n".join(rows)


def _verdict(audit: Audit) -> str:
    if audit.consistent:
        return "the ledger is consistent"
    return f"the ledger is inconsistent: {len(audit.findings)} findings, the first: {audit.findings[0]}"
