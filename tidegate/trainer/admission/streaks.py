"""Counts of consecutive groups without use for training, and the limits at which a run stops."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.trainer.admission.rules import Rules

SOLVED = 0.95
"""Share of all-solved groups among the filtered ones from which on nothing is left to learn."""


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
    solved: int = 0
    """Those of them whose episodes all had the same reward, above 0."""
    stepped: bool = False
    """Whether the run has taken a step, so that its rewards differed once."""

    def solved_reason(self) -> str | None:
        """Why nothing is left to learn; None if something may be."""
        if not self.stepped or not self._only_filtered() or self.solved < SOLVED * self.filtered:
            return None
        return (
            f"nothing is left to learn: in {self.solved} of the {self.filtered} groups since the last step "
            "all episodes have the same reward, above 0"
        )

    def _only_filtered(self) -> bool:
        return self.filtered >= max(256, 32 * self.rules.groups_per_batch)

    def filter(self, *, solved: bool, cut: bool) -> None:
        """Count a filtered group."""
        self.filtered += 1
        self.solved += solved
        self.cut += cut

    def step(self) -> None:
        """Begin the count of filtered groups again."""
        self.filtered = self.cut = self.solved = 0
        self.stepped = True

    def no_progress_reason(self) -> str | None:
        """Reason why training cannot progress any more; None if it can, or if nothing is left to learn."""
        if self.failed >= max(8, self.rules.capacity):
            return f"the last {self.failed} groups all failed"
        if self.unranked >= max(8, self.rules.capacity):
            return f"the last {self.unranked} groups could not be ranked"
        if self._only_filtered() and self.solved_reason() is None:
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
