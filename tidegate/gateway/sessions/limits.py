"""What one session may use of the gateway.

A session that has used up its turns, tokens or seconds is over as far as sampling goes: further calls are
refused for good, and it can only be finished. Its outcome is `truncated`, also where the refusal made the
agent raise: like a reply cut by its length, it ended because of what the policy did with what it was
given, so it is rewarded and trained on. An `agent_error` would be tried again, and would teach a policy
that never comes to an end that this costs nothing. The same goes for a history that has outgrown the
model's context, unless a shorter one is answered after all; a first prompt that does not fit is the agent's
error.

Too many calls at once is another thing: it passes by itself, so the refusal may be retried and leaves no
mark on the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """A session's budgets; None: no bound."""

    turns: int | None = None
    tokens: int | None = None
    """Sampled ones. Calls at once may together exceed it by what each of them was allowed."""
    seconds: float | None = None
    """From its opening until its last call begins; its deadline is later, and ends calls too."""
    calls: int | None = None
    """At once."""

    def over(self, default: SessionLimits) -> SessionLimits:
        """These, and the default's where these say nothing."""
        mine, its = self.to_wire(), default.to_wire()
        return SessionLimits(**{name: its[name] if mine[name] is None else mine[name] for name in mine})

    def to_wire(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}
