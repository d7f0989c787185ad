"""Counts of consecutive groups without use for training, and the limits at which a run stops."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.trainer.admission.rules import Rules


@dataclass(slots=True)
class Streaks:
    """Groups in a row that failed, were not ranked, or were filtered."""

    rules: Rules
    failed: int = 0
    unranked: int = 0
    """Groups whose ranking failed since one was sealed."""
    filtered: int = 0
    """Filtered groups since the last step."""
    cut: int = 0
    """Those of them that failed with every episode cut at a token limit."""

    def no_progress_reason(self) -> str | None:
        """Reason why training cannot progress any more; None if it can."""
        if self.failed >= max(8, self.rules.capacity):
            return f"the last {self.failed} groups all failed"
        if self.unranked >= max(8, self.rules.capacity):
            return f"the last {self.unranked} groups could not be ranked"
        if self.filtered >= max(256, 32 * self.rules.groups_per_batch):
            if 2 * self.cut > self.filtered:
                return (
                    f"{self.filtered} groups were filtered since the last step, and in {self.cut} of them "
                    "every reply was cut at a token limit before it could earn a reward: raise "
                    "sampling.max_tokens, engine.max_context or the agent's own max_tokens"
                )
            return (
                f"{self.filtered} groups were filtered since the last step: their rewards are all equal "
                "(tasks all solved, or all too hard), their episodes were all truncated and masked, or no "
                "episode has a token to train on"
            )
        return None
