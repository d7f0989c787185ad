"""Who watches a run, and what they are told, in plain types. Observing never changes what is observed.

Metrics of a step (`metrics.jsonl` holds the same, one object a line). Each may be missing:

- `step`, `version`, `time` (seconds, any origin)
- `reward/mean`, `reward/std`; `reward/zero_variance_ratio`, the share of groups whose rewards are all alike;
  after an evaluation `eval/reward`, `eval/reward_greedy`, `eval/reward_unseen_templates`
- `staleness/mean`, `staleness/max` (policy versions), `weight_version/mixed_turn_ratio`
- `tokens/sampled`, `tokens/trained`: of this step's batch; `tokens/sampled_total`: by rollouts so far;
  `tokens/trained_total` and `tokens/wasted_<stale, filtered, failed or cancelled>`: of what has ended so far,
  and `tokens/goodput`, the trained share of it
- `time/step` and its parts `time/wait_for_batch` (the trainer waits for data), `time/update`,
  `time/publish`; `time/wait_for_policy` (data was ready before the trainer was); all in seconds
- `groups/<state>`: counts since the start of the run
- `loss`, `grad_norm`, `mismatch_kl`, `lag_kl`, `entropy`, `clip_fraction`, `ess`
- `turns/mean`, `tool_calls/mean`, `length/mean`: of one episode; `episode/<name>`: what agents and
  rewards told of it; `reward/<env>` where a mixture has several environments
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

GROUP_ENDINGS = ("trained", "stepped", "stale", "filtered", "failed", "cancelled")
"""How a group ends, in the ledger's words."""
GROUP_STAGES = ("live", "ready", "leased")
"""Where a group that has not ended is."""


class Observer(Protocol):
    """Something that shows a run while it goes on. No method waits, and none stops the run."""

    def started(self, info: Mapping[str, object]) -> None:
        """`name, dir, model, env, agent, steps, gateway, resumed_from`: texts; `steps` and
        `resumed_from` are numbers of steps, the latter None in a new run."""

    def note(self, text: str) -> None:
        """One line of news."""

    def progress(self, what: str, done: int, total: int) -> None:
        """`what` has come to `done` of `total`; it has ended where they are equal."""

    def state(self, snapshot: Mapping[str, float]) -> None:
        """What is going on now: `groups/<stage or ending>`, `version`, `attempts/live`, and
        `tokens_per_s` or `tokens/sampled_total`."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a step that was taken, or of an evaluation (step 0: before the first step)."""

    def finished(self, result: Mapping[str, object]) -> None:
        """`status` (completed, interrupted, failed), `why`, `before` and `after` (metrics of the first
        and the last evaluation, or None), and where things are: `checkpoint`, `report`; `resume` is the
        command that goes on from there."""

    def close(self) -> None:
        """Give the terminal back; may be called twice."""


class Silent:
    """A view that shows nothing."""

    def started(self, info: Mapping[str, object]) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int) -> None: ...
    def state(self, snapshot: Mapping[str, float]) -> None: ...
    def step(self, metrics: Mapping[str, float]) -> None: ...
    def finished(self, result: Mapping[str, object]) -> None: ...
    def close(self) -> None: ...
