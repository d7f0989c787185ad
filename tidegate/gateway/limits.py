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

from tidegate.gateway.refusal import Refusal

if TYPE_CHECKING:
    from tidegate.gateway.sessions import Session


@dataclass(frozen=True, slots=True)
class Limits:
    """A session's budgets; None: no bound."""

    turns: int | None = None
    tokens: int | None = None
    """Sampled ones. Calls at once may together exceed it by what each of them was allowed."""
    seconds: float | None = None
    """From its opening until its last call begins; its deadline is later, and ends calls too."""
    calls: int | None = None
    """At once."""

    def over(self, default: Limits) -> Limits:
        """These, and the default's where these say nothing."""
        mine, its = self.to_wire(), default.to_wire()
        return Limits(**{name: its[name] if mine[name] is None else mine[name] for name in mine})

    def to_wire(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def check_limits(session: Session, now: float) -> int | None:
    """How many tokens the next call may sample, None for any number; raises Refusal where it may not be.

    `now` is in the event loop's time.
    """
    limits = session.limits
    live = len(session.calls.live)
    if limits.turns is not None and (turns := session.tree.replies() + live) >= limits.turns:
        raise _spent(session, f"turns: {turns} of {limits.turns}")
    if limits.seconds is not None and (seconds := now - session.opened) >= limits.seconds:
        raise _spent(session, f"seconds: {seconds:.0f} of {limits.seconds:g}")
    left = None
    if limits.tokens is not None:
        tokens = session.tree.sampled_tokens
        left = limits.tokens - tokens
        if left <= 0:
            raise _spent(session, f"tokens: {tokens} of {limits.tokens}")
    if limits.calls is not None and live >= limits.calls:
        raise Refusal(
            f"this session has {live} calls under way, and may have {limits.calls} at once",
            status=429,
            type="too_many_calls",
            code="too_many_calls",
            retryable=True,
        )
    return left


def _spent(session: Session, what: str) -> Refusal:
    session.spent = f"the session's budget is used up ({what})"
    return Refusal(
        f"{session.spent}; no more is sampled for it", status=403, type="budget", code="budget_exceeded"
    )
