"""Conditions of the signs. docs/metrics.md has the table of their names, thresholds and remedies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.viewer.formatting import number
from tidegate.viewer.signs.history import EvaluationSeries, MetricHistory, Window

ENTROPY_LEFT = 0.25
"""Share of the first window's entropy."""
SOLVED = 0.5
"""Share of groups that are all solved above which low entropy is what success looks like."""
REPETITION_RISE = 0.15
"""Rise of the share of repeated n-grams since the first window."""
LENGTH_FACTOR = 2.0
"""Growth of the mean length at an equal reward."""
ERRORS = 3.0
"""Standard errors by which the held-out reward must have fallen."""
AGREEMENT = 0.3
"""Least agreement of judge and verifier."""
AGREEMENT_FALL = 0.4
"""Fall of the agreement from its best window."""
EQUAL_GROUPS = 0.8
"""Share of groups whose rewards are all equal."""
STILL = 1e-6
"""KL divergence, in nats per token, between policies one version apart. Runs that learn have 1e-4 to 1e-2."""
PARTED = 0.02
"""KL divergence of engine and trainer, in nats per token. Losses with a trust region stay below 0.013 at a
staleness of 8; in runs that fall back it is 0.036 and more (docs/losses.md)."""
APART = "judge apart from verifier"
FILTERED = "everything filtered"


@dataclass(frozen=True, slots=True)
class Sign:
    """A condition of a run that needs attention."""

    name: str
    metric: str
    """The metric whose curve shows it."""
    numbers: str
    """The values, and the steps that they are of."""
    threshold: str
    """The condition that they fulfil."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.numbers} (threshold: {self.threshold}). {self.remedy}"


def entropy_collapse(history: MetricHistory) -> Sign | None:
    """Low entropy, unless the reward still rises or most groups are solved by every attempt."""
    first, last = history.first("entropy"), history.last("entropy")
    reward, before = history.last("reward/mean"), history.last("reward/mean", back=1)
    if first is None or last is None or reward is None or before is None:
        return None
    solved = history.last("reward/all_solved_ratio")
    rising = reward.mean > before.mean + _errors(reward, before)
    done = solved is not None and solved.mean >= SOLVED
    if rising or done or last.mean >= ENTROPY_LEFT * first.mean:
        return None
    return Sign(
        "entropy collapse", "entropy",
        f"entropy {_in(last)} nats per token, {_in(first)}; the reward does not rise",
        f"below {number(ENTROPY_LEFT, 2)} × the first {_count(first)} steps",
        "The episodes of a task become alike, and comparing them gives no signal. Go back to an earlier "
        "checkpoint with a lower trainer.learning_rate, a larger clip_high of trainer.loss, or a higher "
        "sampling.temperature.",
    )  # fmt: skip


def repetition_rise(history: MetricHistory) -> Sign | None:
    first, last = history.first("repetition/mean"), history.last("repetition/mean")
    if first is None or last is None or last.mean - first.mean < REPETITION_RISE:
        return None
    return Sign(
        "repetition", "repetition/mean",
        f"share of repeated 4-grams {_in(last)}, {_in(first)}",
        f"a rise of {number(REPETITION_RISE, 2)} or more",
        "Read the longest episodes. If the reward does not punish loops, let it; limit sampling.max_tokens; "
        "lower trainer.learning_rate.",
    )  # fmt: skip


def length_explosion(history: MetricHistory) -> Sign | None:
    """Growth against the shortest earlier window whose reward was no lower, up to the standard error."""
    length, reward = history.last("length/mean"), history.last("reward/mean")
    if length is None or reward is None:
        return None
    earlier = zip(history.earlier("length/mean"), history.earlier("reward/mean"), strict=False)
    least = reward.mean - reward.error
    as_good = [(past, then) for past, then in earlier if then.mean >= least]
    if not as_good:
        return None
    past, then = min(as_good, key=lambda pair: pair[0].mean)
    if length.mean < LENGTH_FACTOR * past.mean:
        return None
    return Sign(
        "length explosion", "length/mean",
        f"{number(length.mean, 1)} tokens per episode at reward {number(reward.mean)} in {length.steps}, "
        f"{number(past.mean, 1)} at reward {number(then.mean)} in {past.steps}",
        f"{number(LENGTH_FACTOR, 0)} times the length or more for no higher reward",
        "Set trainer.length_penalty or a lower sampling.max_tokens; compare length/cut_ratio, and read the "
        "longest episodes.",
    )  # fmt: skip


def held_out_fall(history: MetricHistory) -> Sign | None:
    """The training reward rises while a held-out reward falls: reward hacking, or overfitting."""
    found = (_fallen(history, key, series) for key, series in history.held_out.items())
    return next((sign for sign in found if sign is not None), None)


def _fallen(history: MetricHistory, key: str, series: EvaluationSeries) -> Sign | None:
    best = series.best()
    if best is None:
        return None
    newest = series.pairs[-1]
    then = history.until("reward/mean", best.end) or history.first("reward/mean")
    now = history.until("reward/mean", newest.end)
    if then is None or now is None or now.mean <= then.mean + _errors(now, then):
        return None
    error = math.hypot(best.error, newest.error)
    if best.mean - newest.mean <= ERRORS * error:
        return None
    return Sign(
        "held-out fall", key,
        f"{key} {number(newest.mean)} {newest.steps}, {number(best.mean)} {best.steps}; "
        f"reward/mean {number(now.mean)}, before {number(then.mean)}",
        f"a fall of more than {number(ERRORS, 0)} standard errors ({number(ERRORS * error)}) while the "
        "training reward rises",
        "The policy exploits the reward, or fits the training tasks. Read the episodes with the highest "
        "rewards; repair the reward, or add tasks; checkpoints/best has the best policy.",
    )  # fmt: skip


def policy_loses(history: MetricHistory) -> Sign | None:
    """The reward of one of several policies falls while that of another has risen."""
    windows = {key: (history.last(key), history.first(key)) for key in history.policy_rewards()}
    risen = [
        (key, now, first)
        for key, (now, first) in windows.items()
        if now is not None and first is not None and now.mean > first.mean + ERRORS * _errors(now, first)
    ]
    for key, (now, _) in windows.items():
        best = max(history.earlier(key), key=lambda one: one.mean, default=None)
        others = [one for one in risen if one[0] != key]
        if not others or now is None or best is None or now.mean >= best.mean - ERRORS * _errors(now, best):
            continue
        winner, of_winner, before = others[0]
        return Sign(
            "policy loses", key,
            f"{key} {_in(now)}, {_in(best)}; {winner} {_in(of_winner)}, {_in(before)}",
            f"a fall from the best, and a rise from the first, by {number(ERRORS, 0)} standard errors",
            "One policy learns to defeat or to ignore the other. Read their episodes; give the loser a "
            "reward of its own, a higher learning rate, or an earlier self as its opponent "
            "(docs/policies.md).",
        )  # fmt: skip
    return None


def judge_diverges(history: MetricHistory) -> Sign | None:
    """The judge and the environment's own reward part."""
    last = history.last("judge/agreement")
    best = max((past for past in history.earlier("judge/agreement")), key=lambda one: one.mean, default=None)
    remedy = (
        "The policy may exploit the judge. Read the episodes with the highest scores; see docs/judges.md."
    )
    if history.newest("judge/diverging"):
        return Sign(
            APART, "judge/diverging",
            "the judge's scores rise while the environment's own reward falls, over the last episodes",
            "each by more than three standard errors", remedy,
        )  # fmt: skip
    fallen = last is not None and best is not None and last.mean < best.mean - AGREEMENT_FALL
    if last is None or not (fallen or last.mean < AGREEMENT):
        return None
    return Sign(
        APART, "judge/agreement",
        f"agreement {_in(last)}" + (f", {_in(best)}" if best is not None else ""),
        f"below {number(AGREEMENT, 1)}, or {number(AGREEMENT_FALL, 1)} below the best", remedy,
    )  # fmt: skip


def everything_filtered(history: MetricHistory) -> Sign | None:
    """Nearly all groups have equal rewards, and are filtered for it."""
    equal, filtered = history.last("reward/zero_variance_ratio"), history.last("selection/filtered_groups")
    if equal is None or equal.mean < EQUAL_GROUPS or filtered is None or not filtered.mean:
        return None
    solved, failed = history.last("reward/all_solved_ratio"), history.last("reward/all_failed_ratio")
    cut = history.last("length/cut_ratio")
    causes = (0.0, 0.0) if solved is None or failed is None else (solved.mean, failed.mean)
    return Sign(
        FILTERED, "reward/zero_variance_ratio",
        f"share of groups with equal rewards {_in(equal)}: {number(causes[0], 2)} all solved, "
        f"{number(causes[1], 2)} all failed",
        f"{number(EQUAL_GROUPS, 1)} or more",
        remedy_of_equal_groups(*causes, 0.0 if cut is None else cut.mean),
    )  # fmt: skip


def remedy_of_equal_groups(solved: float, failed: float, cut: float) -> str:
    """Returns the remedy for groups with equal rewards, by the cause of most of them.

    Args:
        solved: Number or share of groups whose episodes all succeeded.
        failed: Number or share of groups whose episodes all failed.
        cut: Number or share of groups whose replies were all cut at a token limit.
    """
    if failed and 2 * cut > failed:
        return (
            "Replies are cut at a token limit before they can earn a reward: raise sampling.max_tokens, "
            "engine.max_context or the agent's own max_tokens, or ask for shorter replies."
        )
    if solved > failed:
        return "The tasks are too easy: take harder ones, or end the run."
    return (
        "The tasks are too hard: take easier ones, give partial credit in the reward, raise "
        "trainer.group_size, or fine-tune first (tidegate sft)."
    )


def policy_stands_still(history: MetricHistory) -> Sign | None:
    """Sampler and trainer agree although they are versions apart: the updates change nothing."""
    newest = history.newest("lag_kl")
    if newest is None or newest > 1e3 * STILL:
        return None  # as in nearly all steps: cheaper than the means
    lag, staleness = history.last("lag_kl"), history.last("staleness/mean")
    # The KL divergence grows with the square of the distance.
    if lag is None or staleness is None or staleness.mean < 0.5 or lag.mean >= STILL * staleness.mean**2:
        return None
    if _learns(history):
        return None
    return Sign(
        "policy stands still", "lag_kl",
        f"KL divergence {lag.mean:.1e} nats per token in {lag.steps}, over {number(staleness.mean, 1)} "
        "versions",
        f"below {STILL:.0e} for one version while the reward does not rise",
        "The updates are too small to change the policy. Raise trainer.learning_rate; without it, a rate "
        "that suits the model's size is taken.",
    )  # fmt: skip


def engine_and_trainer_part(history: MetricHistory) -> Sign | None:
    """Tokens are sampled from a distribution that the trainer's is far from.

    With equal weights that is a fault; tokens of old versions may be far away in a run that learns fast.
    """
    newest = history.newest("lag_kl")
    if newest is None or newest < PARTED / 10:
        return None  # as in nearly all steps: cheaper than the means
    lag, mismatch = history.last("lag_kl"), history.last("mismatch_kl")
    if lag is None or lag.mean < PARTED:
        return None
    differ = mismatch is not None and mismatch.mean >= PARTED
    if not differ and _learns(history):
        return None
    drift, clipped = history.last("logprob_drift"), history.last("clip_fraction")
    details = [f", logprobs of sampled tokens differ by {number(drift.mean)}"] if drift is not None else []
    details += [f", {number(clipped.mean)} of the tokens are clipped"] if clipped is not None else []
    if mismatch is not None and differ:
        details.append(f"; {number(mismatch.mean)} with equal weights")
        remedy = (
            "Engine and trainer compute other logprobs for the same weights: use the same data type "
            "(engine.dtype, trainer.compute_dtype) and no quantisation; trainer.routing_replay with experts. "
        )
    else:
        remedy = "Tokens are too old: lower trainer.max_staleness or trainer.learning_rate. "
    return Sign(
        "engine and trainer part", "lag_kl",
        f"KL divergence {_in(lag)} nats per token" + "".join(details),
        f"{number(PARTED, 2)} or more",
        remedy + 'See trainer.loss.name and score_centering in docs/losses.md.',
    )  # fmt: skip


RULES: tuple[Callable[[MetricHistory], Sign | None], ...] = (
    entropy_collapse, repetition_rise, length_explosion, held_out_fall, judge_diverges, everything_filtered,
    policy_stands_still, engine_and_trainer_part, policy_loses,
)  # fmt: skip


def _learns(history: MetricHistory) -> bool:
    """Returns whether the reward rises, or most groups are solved; True while there are too few steps."""
    reward, before = history.last("reward/mean"), history.last("reward/mean", back=1)
    if reward is None or before is None or reward.mean > before.mean + ERRORS * _errors(reward, before):
        return True
    solved = history.last("reward/all_solved_ratio")
    return solved is not None and solved.mean >= SOLVED


def _errors(one: Window, other: Window) -> float:
    """Returns the standard error of the difference of two means."""
    return math.hypot(one.error, other.error)


def _in(window: Window) -> str:
    return f"{number(window.mean)} in {window.steps}"


def _count(window: Window) -> int:
    return window.end - window.start + 1
