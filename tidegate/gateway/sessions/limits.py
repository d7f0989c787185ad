"""Budgets of one session.

A session that has used up its turns, tokens, seconds or tool calls gets no more of them and should be
finished. Its outcome is `truncated`, even if the refusal made the agent raise: the end follows from the
policy's behaviour, as with a reply at its length limit, so the session is rewarded and trained on. As an
`agent_error` it would be attempted again, and the policy never penalised for failing to terminate. The same
holds for a history that exceeds the model's context, unless a later, shorter request succeeds; a first
prompt that does not fit is the agent's error. Exceeding the number of concurrent calls is transient: the
refusal may be retried and does not change the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from tidegate.types import fields_of

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """A session's budgets; None means unlimited."""

    turns: Count | None = None
    tokens: Count | None = None
    """Sampled tokens. Concurrent calls may exceed it together: each may use all tokens left at its start."""
    seconds: Seconds | None = None
    """Seconds from opening in which calls may start; the deadline also ends running calls."""
    calls: Count | None = None
    """Concurrent calls."""
    tool_calls: Count | None = None
    """Calls of the environment's tools."""

    def with_defaults(self, default: SessionLimits) -> SessionLimits:
        own = {name: value for name, value in fields_of(self).items() if value is not None}
        return SessionLimits(**fields_of(default) | own)
