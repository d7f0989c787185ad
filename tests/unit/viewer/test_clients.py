"""The records of a service's clients, folded: means and intervals against figures by hand."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.unit.viewer.service_run import write_service_run
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.state import LedgerState
from tidegate.viewer.clients.records import MOST_NAMES, OTHER, ClientRecords
from tidegate.viewer.clients.running_mean import RunningMean
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.dashboard.service import (
    ends_by_key,
    feedback_rows,
    publish_waits_since,
    reward_chart,
    service,
    version_rows,
    versions_of,
)
from tidegate.viewer.ledger import apply_entries


def mean_of(*values: float) -> RunningMean:
    found = RunningMean()
    for value in values:
        found.add(value)
    return found


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([1.0], 0.206549, 1.0),  # Wilson: 1 ÷ (1 + z²) to 1
        ([0.0], 0.0, 0.793451),
        ([1.0] * 10, 0.722467, 1.0),
        ([0.0, 1.0], 0.094531, 0.905469),
        ([1.0] * 8 + [0.0] * 2, 0.490162, 0.943318),  # Newcombe 1998 has 0.4902 to 0.9433
        ([0.2, 0.4], -0.970620, 1.570620),  # 0.3 ± 12.7062 · 0.141421 ÷ √2
        ([1.0, 2.0, 3.0], -0.484138, 4.484138),  # 2 ± 4.30265 · 1 ÷ √3
    ],
)
def test_intervals_by_hand(values: list[float], low: float, high: float) -> None:
    found = mean_of(*values).interval()
    assert found == pytest.approx((low, high), abs=2e-6)


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5, 0.5], [-1.0]])
def test_values_without_a_spread_have_no_interval(values: list[float]) -> None:
    row = mean_of(*values).to_wire()
    assert (row["low"], row["high"]) == (None, None)
    assert row["mean"] == (values[0] if values else None)


def test_joined_means_are_those_of_all_values() -> None:
    rng = random.Random(0)
    parts = [[rng.gauss(100, 1) for _ in range(size)] for size in (0, 1, 7, 200)]
    joined = RunningMean.of(mean_of(*part) for part in parts)
    values = [value for part in parts for value in part]
    assert joined.mean == pytest.approx(statistics.fmean(values))
    assert joined.squares / (joined.count - 1) == pytest.approx(statistics.variance(values))
    assert RunningMean.of([]).to_wire()["mean"] is None
    assert RunningMean.of([mean_of(1.0), mean_of(1.0, 0.0)]).interval() == mean_of(1.0, 0.0, 1.0).interval()


def line(group: str, state: str = "taken", *episodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    client = group.partition(".")[0]
    return {"group": group, "client": client, "state": state, "episodes": list(episodes), **more}


def episode(reward: float, oldest: int = 1, newest: int | None = None, **more: Any) -> dict[str, Any]:
    return {"reward": reward, "oldest": oldest, "newest": newest if newest is not None else oldest, **more}


def test_rewards_are_by_key_and_by_version_of_all_tokens() -> None:
    records = ClientRecords()
    records.read([
        line("a.1", "taken", episode(1.0, 1)), line("a.2", "refused", episode(0.0, 1), why="stale by 3"),
        line("b.1", "taken", episode(1.0, 2), episode(0.5, 1, 2)), line("b.2", "unrewarded"),
    ])  # fmt: skip
    assert {key: (one.count, one.mean) for key, one in records.rewards.items()} == {
        "a": (2, 0.5), "b": (2, 0.75),
    }  # fmt: skip
    assert {version: one.count for version, one in records.versions.items()} == {1: 2, 2: 1}
    assert (records.mixed.count, records.mixed.mean) == (1, 0.5)
    assert records.refusals == {"stale by …": 1}


def test_a_group_that_is_there_twice_counts_once() -> None:
    records = ClientRecords()
    for state in ("refused", "refused", "taken"):
        records.add(line("a.1", state, episode(1.0, comments=1), why="too many"))
    assert records.groups == {"a.1": ("a", "taken")}
    assert (records.rewards["a"].count, records.refusals, records.comments) == (1, {"too many": 1}, 1)


def test_feedback_is_by_name_with_its_delay() -> None:
    records = ClientRecords()
    for value, seconds in ((1.0, 1.0), (0.0, 2.0), (1.0, 4.0), (1.0, None)):
        given = [{"name": "thumb", "value": value, "after_s": seconds}]
        parts = {"thumb": value, "polite": 0.2}
        records.add(line(f"a.{len(records.groups)}", "taken", episode(1.0, feedback=given, parts=parts)))
    thumb, polite = feedback_rows(records.named)
    assert (thumb["name"], thumb["count"], thumb["mean"]) == ("thumb", 4, 0.75)
    assert thumb["delays"] == pytest.approx([2.0, 3.6, 4.0])
    assert (polite["name"], polite["count"], polite["delays"]) == ("polite", 4, None)


def test_names_that_clients_choose_are_bounded() -> None:
    records = ClientRecords()
    for number in range(MOST_NAMES + 50):
        records.add(line(f"a.{number}", "taken", episode(1.0, parts={f"name {number}": 1.0})))
    assert len(records.named) == MOST_NAMES + 1
    assert records.named[OTHER].values.count == 50
    assert len(feedback_rows(records.named)) == 50


@pytest.mark.parametrize(
    "broken",
    [
        {}, {"group": 1, "client": "a", "state": "taken"}, line("a.1", "taken", {"reward": "1"}),
        line("a.1", "taken", {"reward": math.nan, "feedback": [1, {}, {"name": ["x"], "value": 1}]}),
        {**line("a.1"), "episodes": 3},
    ],
)  # fmt: skip
def test_what_is_damaged_is_left_out(broken: dict[str, Any]) -> None:
    records = ClientRecords()
    records.add(broken)
    assert (records.rewards, records.named) == ({}, {})


def test_the_ledger_decides_what_became_of_a_group() -> None:
    ledger, records = LedgerState(), ClientRecords()
    lines: list[Any] = []
    ends = {"t": "stepped", "f": "filtered", "s": "stale", "c": "cancelled"}
    for name in ("w", *ends):
        lines.append(entry("group", "issued", id=f"a.{name}", task="conversation", client="a"))
        records.add(line(f"a.{name}"))
    lines += [entry("group", "ended", id=f"a.{name}", state=state) for name, state in ends.items()]
    apply_entries(ledger, lines)
    records.read([line("a.r", "refused"), line("a.t", "refused"), line("b.u", "unrewarded"),
                  line("b.e", "reward_error"), line("b.new")])  # fmt: skip
    counts = ends_by_key(ledger, 100, records)
    assert counts["a"] == dict.fromkeys(
        ("trained", "waiting", "filtered", "stale", "cancelled", "refused"), 1
    )
    assert counts["b"] == {"unrewarded": 1, "failed": 1, "waiting": 1}


def run_line(event: str, version: int, step: int, seq: int, **more: Any) -> Any:
    return {**entry("run", event, version=version, step=step, **more), "seq": seq, "time": 100.0 + seq}


def test_versions_have_their_rewards_and_the_results_of_their_tests() -> None:
    ledger = LedgerState()
    figures = {"reward": 0.4, "live_reward": 0.8, "episodes": 30, "live_episodes": 50}
    lines = [
        run_line("started", 1, 0, 0), run_line("publishing", 2, 1, 1),
        run_line("publishing", 3, 2, 2, candidate=True),
        run_line("rolled_back", 3, 2, 3, to=2, why="worse", **figures),
    ]  # fmt: skip
    apply_entries(ledger, lines)
    rewards = {1: mean_of(1.0, 0.0), 3: mean_of(0.0)}
    newest, live, first = version_rows(versions_of(ledger), rewards)
    assert (newest["version"], newest["state"], newest["why"]) == (3, "rolled back", "worse")
    assert (newest["reward"], newest["live_reward"], newest["rewards"]["high"]) == (
        0.4, 0.8, pytest.approx(0.793451, abs=1e-6),
    )  # fmt: skip
    assert (live["state"], live["rewards"]["count"], first["rewards"]["mean"]) == ("live", 0, 0.5)
    chart = reward_chart(versions_of(ledger), rewards)
    assert chart is not None
    assert '"points":[[0.0,0.5],[2.0,0.0]]' in chart.data


def test_a_publish_waits_between_a_step_and_its_publish() -> None:
    trainer = {"max_stale_share": 0.1, "publish_interval": 2, "steps": 5}
    ledger, seq = LedgerState(), itertools.count()

    def after(*lines: Any) -> float | None:
        apply_entries(ledger, ({**line, "seq": next(seq)} for line in lines))
        return publish_waits_since(ledger, trainer)

    def stepped(step: int, at: float) -> Any:
        apply_entries(ledger, [entry("group", "issued", id=f"a{at}", task="t")])
        return {**entry("group", "ended", id=f"a{at}", state="stepped", step=step), "time": at}

    assert after(run_line("started", 1, 0, 0)) is None
    assert after(stepped(1, 7.0)) is None, "this step is not published"
    assert after(stepped(2, 8.0), stepped(2, 9.0)) == 9.0
    assert publish_waits_since(ledger, {}) is None, "no publish may wait"
    assert after(run_line("publishing", 2, 2, 9)) is None
    assert after(stepped(5, 10.0)) == 10.0, "the last step always is"
    assert after(run_line("ended", 2, 5, 11)) is None


def test_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    write_service_run(tmp_path / "run")
    run = FollowedRun(tmp_path / "run")
    assert service(run)["total"]["count"] == 5
