"""Each sign on a series of metrics that triggers it, and on near ones that do not."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests import REPO
from tests.unit.viewer.viewer_run import write_run
from tidegate.viewer.console import SafeConsole
from tidegate.viewer.live import screen
from tidegate.viewer.live_state import LiveState
from tidegate.viewer.log_view import PlainView
from tidegate.viewer.run_files import read_run
from tidegate.viewer.signs.history import WINDOW
from tidegate.viewer.signs.rules import APART, FILTERED
from tidegate.viewer.signs.watch import SignWatch, watch_of, watch_of_run

STEPS = 60
PLAIN = ("entropy", "lag_kl", "mismatch_kl", "logprob_drift", "clip_fraction")
Curve = Callable[[int], float]


def flat(value: float) -> Curve:
    return lambda step: value


def line(start: float, end: float) -> Curve:
    return lambda step: start + (end - start) * (step - 1) / (STEPS - 1)


def run(seed: int = 0, **curves: Curve | None) -> SignWatch:
    """The signs after 60 steps of a healthy run in which some curves are replaced; noise of a few percent."""
    rng = random.Random(seed)
    healthy: dict[str, Curve | None] = {
        "entropy": line(0.6, 0.4), "repetition_mean": flat(0.05), "length_mean": line(100, 130),
        "reward_mean": line(0.4, 0.6), "reward_std": flat(0.5), "reward_zero_variance_ratio": flat(0.5),
        "reward_all_solved_ratio": flat(0.3), "reward_all_failed_ratio": flat(0.2),
        "lag_kl": flat(1e-3), "staleness_mean": flat(1.5), "selection_filtered_groups": flat(8),
        "eval_reward": line(0.4, 0.6), "eval_episodes": flat(200),
    }  # fmt: skip
    exact = ("judge_diverging", "eval_episodes", "selection_filtered_groups")
    watch = SignWatch()
    for step in range(STEPS + 1):
        row = {"step": float(step)}
        for name, curve in (healthy | curves).items():
            evaluated = name.startswith("eval")
            if curve is not None and (step % 10 == 0 if evaluated else step > 0):
                noise = 1.0 if name in exact else rng.gauss(1.0, 0.03)
                row[name.replace("_", "/", 1) if name not in PLAIN else name] = curve(max(step, 1)) * noise
        watch.step(row)
    return watch


def test_a_healthy_run_has_no_sign() -> None:
    for seed in range(20):
        assert not run(seed).current, f"seed {seed}"


TRIGGERS: dict[str, dict[str, Curve]] = {
    "entropy collapse": {"entropy": lambda step: 0.6 if step < 30 else 0.05, "reward_mean": flat(0.5)},
    "repetition": {"repetition_mean": line(0.05, 0.4)},
    "length explosion": {"length_mean": line(100, 400), "reward_mean": flat(0.5)},
    "held-out fall": {"reward_mean": line(0.4, 0.9), "eval_reward": lambda step: 0.7 if step <= 30 else 0.4},
    APART: {"judge_agreement": line(0.8, 0.25)},
    FILTERED: {"reward_zero_variance_ratio": flat(0.95), "reward_all_failed_ratio": flat(0.9),
               "reward_all_solved_ratio": flat(0.05)},
    "policy stands still": {"lag_kl": flat(2e-8), "reward_mean": flat(0.5)},
    "engine and trainer part": {"lag_kl": flat(0.05), "reward_mean": flat(0.5)},
    "policy loses": {"policy/a/reward": line(0.3, 0.9), "policy/b/reward": line(0.7, 0.2)},
}  # fmt: skip

QUIET: dict[str, list[dict[str, Curve | None]]] = {
    "entropy collapse": [
        {"entropy": lambda step: 0.6 if step < 30 else 0.2, "reward_mean": flat(0.5)},  # a third of it
        {"entropy": lambda step: 0.6 if step < 30 else 0.05, "reward_mean": line(0.1, 0.9)},
        {"entropy": lambda step: 0.6 if step < 30 else 0.05, "reward_mean": flat(0.9),
         "reward_all_solved_ratio": flat(0.7)},
        {"entropy": lambda step: 0.6 if step < 30 else 0.05, "reward_mean": None},  # fine-tuning
    ],
    "repetition": [{"repetition_mean": line(0.05, 0.18)}, {"repetition_mean": flat(0.6)}],
    "length explosion": [
        {"length_mean": line(100, 170), "reward_mean": flat(0.5)},
        {"length_mean": line(100, 400), "reward_mean": line(0.2, 0.8)},  # longer, and better
    ],
    "held-out fall": [
        {"reward_mean": line(0.4, 0.9), "eval_reward": lambda step: 0.7 if step <= 30 else 0.66},
        {"reward_mean": line(0.9, 0.4), "eval_reward": lambda step: 0.7 if step <= 30 else 0.4},
        # One low evaluation is not a fall.
        {"reward_mean": line(0.4, 0.9), "eval_reward": lambda step: 0.6 if step == 60 else 0.7},
        # 0.12 lower, which 12 episodes cannot show.
        {"reward_mean": line(0.4, 0.9), "eval_reward": lambda step: 0.7 if step <= 30 else 0.58,
         "eval_episodes": flat(12)},
    ],
    APART: [{"judge_agreement": line(0.8, 0.55)}, {"judge_agreement": flat(0.4), "judge_diverging": flat(0)}],
    "policy stands still": [
        {"lag_kl": flat(5e-6), "reward_mean": flat(0.5)},
        {"lag_kl": flat(0.0), "staleness_mean": flat(0.0), "reward_mean": flat(0.5)},  # on policy
        {"lag_kl": flat(2e-8), "reward_mean": flat(0.9), "reward_all_solved_ratio": flat(0.7)},
        {"lag_kl": flat(2e-8), "reward_mean": line(0.1, 0.9)},
    ],
    "engine and trainer part": [
        {"lag_kl": flat(0.012), "reward_mean": flat(0.5)},  # as at a staleness of 8
        {"lag_kl": lambda step: 0.05 if step > 57 else 1e-3, "reward_mean": flat(0.5)},
        {"lag_kl": flat(0.2), "mismatch_kl": flat(1e-6), "reward_mean": line(0.1, 0.9)},
        {"lag_kl": flat(0.2), "reward_mean": flat(0.9), "reward_all_solved_ratio": flat(0.7)},
    ],
    "policy loses": [
        {"policy/a/reward": line(0.3, 0.9), "policy/b/reward": line(0.5, 0.6)},  # both learn
        {"policy/a/reward": flat(0.5), "policy/b/reward": line(0.7, 0.2)},  # nobody wins
        {"policy/a/reward": lambda step: 0.3 if step < 20 else 0.9 if step < 40 else 0.6},  # up, then down
    ],
    FILTERED: [
        {"reward_zero_variance_ratio": flat(0.7)},
        # Compared over the batch: groups of one episode are always alike and never filtered.
        {"reward_zero_variance_ratio": flat(1.0), "selection_filtered_groups": flat(0)},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TRIGGERS)
def test_a_series_with_the_fault_triggers_its_sign_alone(name: str) -> None:
    for seed in range(5):
        current = run(seed, **TRIGGERS[name]).current
        assert list(current) == [name]
        sign = current[name].sign
        assert all(len(text) > 10 for text in (sign.numbers, sign.threshold, sign.remedy))


def test_what_parts_engine_and_trainer_is_told() -> None:
    curves = {"lag_kl": flat(0.05), "logprob_drift": flat(0.2), "clip_fraction": flat(0.1)}
    old = run(mismatch_kl=flat(1e-6), reward_mean=flat(0.5), **curves)
    sign = old.current["engine and trainer part"].sign
    assert "logprobs of sampled tokens differ by 0.2" in sign.numbers
    assert "of the tokens are clipped" in sign.numbers
    assert sign.remedy.startswith("Tokens are too old: lower trainer.max_staleness")
    other = run(lag_kl=flat(0.05), mismatch_kl=flat(0.05)).current["engine and trainer part"].sign
    assert "with equal weights" in other.numbers
    assert other.remedy.startswith("Engine and trainer compute other logprobs for the same weights")


def test_a_policy_that_rose_and_fell_loses_to_a_later_one_that_wins() -> None:
    curves = {
        "policy/a/reward": lambda step: 0.3 if step < 20 else 0.9 if step < 40 else 0.6,
        "policy/b/reward": line(0.3, 0.9),
    }
    assert run(0, **curves).current["policy loses"].sign.metric == "policy/a/reward"


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in QUIET for case in range(len(QUIET[name]))]
)
def test_a_similar_series_without_the_fault_does_not(name: str, case: int) -> None:
    for seed in range(5):
        assert not run(seed, **QUIET[name][case]).current


def test_failures_of_cut_replies_are_not_taken_for_hard_tasks() -> None:
    curves = {**TRIGGERS[FILTERED], "length_cut_ratio": flat(0.95)}
    remedy = run(0, **curves).current[FILTERED].sign.remedy
    assert "cut at a token limit" in remedy
    assert "too hard" not in remedy
    watch = SignWatch()
    counts = {"groups/filtered": 120, "groups/filtered_failed": 120, "groups/filtered_cut": 119}
    sign = watch.state(counts)
    assert sign is not None
    assert "raise sampling.max_tokens" in str(sign)
    assert "119 with every reply cut" in sign.numbers


def test_the_newest_value_of_diverging_is_a_sign_at_once() -> None:
    watch = run(judge_agreement=flat(0.7), judge_diverging=lambda step: float(step == STEPS))
    assert [str(held.sign)[:60] for held in watch.current.values()] == [
        "judge apart from verifier: the judge's scores rise while the"
    ]
    assert watch.current[APART].since == STEPS


def test_the_numbers_are_those_of_the_windows() -> None:
    """Entropy 0.8 in the first ten steps and 0.1 in the last ten; the reward is constant."""
    watch = SignWatch()
    begun = [
        str(sign)
        for step in range(1, 31)
        for sign in watch.step({"step": step, "entropy": 0.8 if step <= 10 else 0.1, "reward/mean": 0.5})
    ]
    assert len(begun) == 1
    assert begun[0].startswith(
        "entropy collapse: entropy 0.100 in steps 11–20 nats per token, 0.800 in steps 1–10; the reward does "
        "not rise (threshold: below 0.25 × the first 10 steps). The episodes"
    )


def test_the_standard_error_of_an_evaluation_is_that_of_rewards_of_0_and_1() -> None:
    watch = watch_of(
        {"step": step, "eval/reward": value, "eval/episodes": 100} for step, value in ((0, 0.5), (10, 0.7))
    )
    [(key, series)] = watch.history.held_out.items()
    [pair] = series.pairs
    shares = [51 / 102, 71 / 102]
    assert (key, pair.mean, pair.steps) == ("eval/reward", pytest.approx(0.6), "after steps 0 and 10")
    assert pair.error == pytest.approx(math.sqrt(sum(share * (1 - share) / 100 for share in shares)) / 2)


def test_suites_and_rewards_outside_0_and_1_are_compared_too() -> None:
    def suite(spread: float) -> SignWatch:
        watch = SignWatch()
        for step in range(1, 61):
            watch.step({"step": step, "reward/mean": float(step), "reward/std": spread})
            if step % 10 == 0:
                watch.step(
                    {
                        "step": step,
                        "eval/hard/reward": -1.0 if step > 30 else 3.0,
                        "eval/hard/episodes": 50,
                    }
                )
        return watch

    assert suite(2.0).current["held-out fall"].sign.metric == "eval/hard/reward"
    assert not suite(15.0).current


def test_a_sign_at_its_threshold_is_reported_once_and_ends_after_a_window() -> None:
    watch, begun = SignWatch(), []
    for step in range(1, 80):
        share = (0.9 if step % 2 else 0.7) if step <= 40 else 0.3
        row = {"step": step, "reward/zero_variance_ratio": share, "selection/filtered_groups": 5.0}
        begun += [(step, sign.name) for sign in watch.step(row)]
    assert begun == [(10, FILTERED)]
    assert not watch.current
    [held] = watch.past
    assert (held.since, held.until) == (10, 40)


def test_a_metric_that_is_no_longer_reported_gives_no_sign() -> None:
    watch = SignWatch()
    for step in range(1, 60):
        row = {"reward/zero_variance_ratio": 0.9, "selection/filtered_groups": 5.0}
        watch.step({"step": step, **(row if step <= 20 else {})})
    assert not watch.current
    assert [held.until for held in watch.past] == [29]


def test_a_resumed_run_takes_its_steps_again() -> None:
    watch = SignWatch()
    row = {"reward/zero_variance_ratio": 0.85, "selection/filtered_groups": 5.0}
    for step in range(1, 16):
        watch.step({"step": step, **row})
    assert watch.current[FILTERED].since == 10
    watch.step({"step": 6, "reward/zero_variance_ratio": 0.0})
    assert not watch.current
    begun = [step for step in range(7, 30) if watch.step({"step": step, **row})]
    assert begun == [16], "the mean over steps 7–16 has no low value"


def test_groups_that_are_filtered_between_steps_are_seen_without_a_step() -> None:
    watch = SignWatch()
    watch.step({"step": 3, "groups/filtered": 50.0, "groups/filtered_failed": 10.0})
    assert watch.state({"groups/filtered": 149.0, "groups/filtered_failed": 109.0}) is None
    ready = {"groups/filtered": 250.0, "groups/leased": 12.0}
    assert watch.state(ready) is None, "6% can be trained on"
    sign = watch.state({"groups/filtered": 250.0, "groups/filtered_failed": 210.0, "groups/leased": 5.0})
    assert sign is not None
    assert "200 groups filtered since step 3: 0 all solved, 200 all failed; 5 can be trained on" in str(sign)
    assert "too hard" in sign.remedy
    assert "1 group filtered since step 3: 0 all" in watch.filtered({"groups/filtered": 51.0})
    assert watch.state({"groups/filtered": 400.0}) is None, "reported once"
    watch.step({"step": 4, "groups/filtered": 400.0})
    assert watch.state({"groups/filtered": 450.0}) is None


def faulty(step: int) -> dict[str, float]:
    return {"step": step, "reward/mean": 0.5, "repetition/mean": 0.1 if step <= 20 else 0.5}


def test_the_plain_view_prints_a_warning_when_a_sign_begins(tmp_path: Path) -> None:
    file = io.StringIO()
    view = PlainView(SafeConsole(Console(file=file, width=80)), 60, 2)
    for step in range(1, 41):
        view.step(faulty(step))
    view.state({"groups/filtered": 500.0})
    warnings = [text for text in file.getvalue().splitlines() if "warning:" in text]
    assert [text.split("warning: ")[1].split(":")[0] for text in warnings] == ["repetition", FILTERED]
    assert "Read the longest episodes" in warnings[0]


def test_a_resumed_run_and_the_final_summary_read_the_steps_before(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        dropped = {"groups/stale": 7.0, "staleness_dropped/mean": 3.3, "staleness_dropped/max": 5.0}
        file.writelines(json.dumps({**faulty(step), **dropped}) + "\n" for step in range(1, 41))
    assert list(watch_of_run(tmp_path).current) == ["repetition"]
    assert not watch_of_run(tmp_path / "elsewhere").current
    text = io.StringIO()
    view = PlainView(SafeConsole(Console(file=text, width=80)), 60, 2)
    view.started({"name": "again", "dir": str(tmp_path), "resumed_from": 40})
    view.step(faulty(41))
    assert "warning" not in text.getvalue(), "the sign began before the resume"
    view.finished({"status": "completed"})
    assert "Warnings\n  repetition: share of repeated 4-grams 0.500 in" in text.getvalue()
    assert "7 groups were dropped as stale: 3.3 versions old on average, 5 at most." in text.getvalue()


def test_the_live_view_has_a_line_of_signs() -> None:
    board = LiveState(60, 2, 0.0)
    console = Console(file=io.StringIO(), width=100)
    for step in range(1, 41):
        board.add_step(faulty(step), float(step))
        if step == 20:
            assert "warnings" not in _text(board, console)
    assert "warnings   repetition" in _text(board, console)


def _text(board: LiveState, console: Console) -> str:
    with console.capture() as captured:
        console.print(screen(board, 50.0, 100))
    return captured.get()


def test_a_run_that_learned_its_task_has_no_sign(tmp_path: Path) -> None:
    assert not watch_of(read_run(write_run(tmp_path / "run")).rows).current


def test_the_page_of_metrics_lists_every_sign() -> None:
    page = (REPO / "docs" / "metrics.md").read_text()
    table = page[page.index("## Signs") :]
    for name in TRIGGERS:
        assert f"| {name} |" in table
    assert f"over {WINDOW} steps" in table
