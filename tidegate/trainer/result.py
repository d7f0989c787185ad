"""Result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RunResult:
    """Result of a run; `initial_eval` and `final_eval` are metrics of its first and last evaluation."""

    status: str
    """`completed`, `interrupted` or `failed`, as in the ledger."""
    why: str | None
    step: int
    initial_eval: dict[str, float] = field(default_factory=dict)
    final_eval: dict[str, float] = field(default_factory=dict)
