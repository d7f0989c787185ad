"""The course of a candidate's test: what is written, loaded, recorded and restored for each result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tidegate.errors import GatewayError
from tidegate.gateway.client import GroupRow
from tidegate.settings.promotion import PromotionSettings
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.publish import promotion as module
from tidegate.trainer.publish.canary import FILE, write_state
from tidegate.trainer.publish.promotion import Promotion
from tidegate.trainer.publish.sequential_test import Comparison


class World:
    """Gateway, engines, publisher and policy of a test; what was done with them is in `done`.

    Args:
        rewards: Reward of each further conversation of the candidate; those of the live version are 1.
        mode: `trainer.promotion.mode`.
        max_wait_s: Time limit of a canary.
    """

    def __init__(self, rewards: float = 1.0, mode: str = "canary", max_wait_s: float = 600.0) -> None:
        self.rewards = rewards
        self.done: list[str] = []
        self.ledger: list[LedgerEntry] = []
        self.stop = asyncio.Event()
        self.rows = [GroupRow("earlier", "ready", 1, [], newest_version=1, reward=0.0)]
        self.admission = Admission(
            Rules(groups_per_batch=1, group_size=1, min_group_size=1, max_staleness=2), self.ledger.append
        )
        self.fail_polls = 0
        self.decided: Callable[[], bool | None] = lambda: None
        canary = {"max_wait_s": max_wait_s} if mode == "canary" else {}
        world = cast(Any, self)
        self.promotion = Promotion(
            settings=PromotionSettings.model_validate({"mode": mode, **canary}), admission=self.admission,
            publisher=world, engines=world, gateway=world,
            evaluate=self.evaluate, restore=self.restore, note=self.done.append, stop=self.stop,
            requested=lambda: self.decided(),
        )  # fmt: skip

    async def write_candidate(self, version: int) -> Path:
        self.done.append(f"write {version}")
        return Path(f"candidate-{version}")

    async def ensure_serving(self, weights: Path, version: int) -> bool:
        return True

    async def list_groups(self) -> list[GroupRow]:
        """Each poll finds 50 further conversations of either version."""
        if self.fail_polls:
            self.fail_polls -= 1
            raise GatewayError("it is restarting")
        found, count = list(self.rows), len(self.rows)
        for number in range(count, count + 50):
            self.rows += [
                GroupRow(f"c{number}", "ready", 1, [], newest_version=1, reward=self.rewards),
                GroupRow(f"l{number}", "ready", 0, [], newest_version=0, reward=1.0),
            ]
        return found

    async def evaluate(self, step: int, version: int | None) -> list[float]:
        return [1.0] * 10 if version is None else [self.rewards] * 10

    async def publish_candidate(self, weights: Path, version: int) -> None:
        self.done.append(f"publish {version}")

    async def discard_candidate(self, weights: Path) -> None:
        self.done.append(f"discard {weights}")

    async def release(self) -> None:
        self.done.append("release")

    async def restore(self) -> None:
        self.done.append("restore")

    @property
    def events(self) -> list[str]:
        return [line["event"] for line in self.ledger]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)


@pytest.mark.parametrize("mode", ["canary", "evaluated"])
async def test_a_candidate_that_is_not_worse_goes_live(mode: str) -> None:
    world = World(1.0, mode)
    metrics = await world.promotion.publish(3)
    assert world.events == ["publishing", "promoted"]
    assert world.done[:3] == ["write 1", "publish 1", "release"]
    assert "version 1 is live: mean reward 1.000" in world.done[3]
    assert (world.admission.version, world.promotion.live_step) == (1, 3)
    assert metrics["promotion/promoted"] == 1.0


@pytest.mark.parametrize("mode", ["canary", "evaluated"])
async def test_a_worse_candidate_is_given_up_and_the_policy_restored(mode: str) -> None:
    world = World(0.0, mode)
    metrics = await world.promotion.publish(3)
    assert world.events == ["publishing", "rolled_back"]
    assert world.done[:4] == ["write 1", "restore", "release", "discard candidate-1"]
    assert (world.admission.version, world.promotion.live_step) == (0, 3)
    assert world.admission.versions.abandoned == {1}
    assert (metrics["promotion/promoted"], metrics["promotion/live_reward"]) == (0.0, 1.0)
    world.rewards = 1.0
    if mode == "evaluated":
        await world.promotion.publish(4)
        assert world.admission.version == 2, "the next number, as a number belongs to one set of weights"


async def test_the_policy_is_restored_even_if_the_engines_cannot_be_released() -> None:
    """The run then ends with a checkpoint, which must not have the weights that were worse."""
    world = World(0.0, "evaluated")

    async def fail() -> None:
        raise GatewayError("it is away")

    world.release = fail  # type: ignore[method-assign]
    with pytest.raises(GatewayError):
        await world.promotion.publish(3)
    assert world.events == ["publishing", "rolled_back"]
    assert world.done == ["write 1", "restore"]


async def test_a_cancelled_restoration_is_not_recorded_as_a_roll_back() -> None:
    """The policy is not the live version's then, so no entry may state this, and no checkpoint is written."""
    world, begun = World(0.0, "evaluated"), asyncio.Event()

    async def restore() -> None:
        begun.set()
        await asyncio.Event().wait()

    world.promotion.restore = restore
    publishing = asyncio.create_task(world.promotion.publish(3))
    await asyncio.wait_for(begun.wait(), 10)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert world.events == ["publishing"]
    assert (world.admission.version, world.promotion.live_step, world.promotion.active) == (0, None, False)
    assert not world.admission.versions.abandoned


async def test_a_test_survives_a_restart_of_the_gateway_and_counts_no_earlier_conversation() -> None:
    world = World(1.0)
    world.fail_polls = 3
    await world.promotion.publish(1)
    figures = world.ledger[-1]
    assert figures["reward"] == 1.0, "the earlier conversation's reward is 0"


async def test_the_state_of_a_test_is_written_while_it_runs(tmp_path: Path) -> None:
    world = World(1.0)
    seen: list[dict[str, Any]] = []

    def progress(version: int, comparison: Comparison) -> None:
        write_state(tmp_path, 0.1, version, comparison)
        seen.append(json.loads((tmp_path / FILE).read_text()))

    world.promotion.progress = progress
    await world.promotion.publish(1)
    first, last = seen[0], seen[-1]
    assert (first["version"], first["episodes"], first["low"], first["high"]) == (1, 0, None, None)
    assert (last["episodes"], last["reward"], last["live_reward"]) == (world.ledger[-1]["episodes"], 1.0, 1.0)
    assert last["low"] > -0.1, "it is promoted by this look"


async def test_without_a_result_in_time_a_candidate_is_rolled_back() -> None:
    world = World(1.0, max_wait_s=1e-9)
    await world.promotion.publish(1)
    assert world.events == ["publishing", "rolled_back"]
    assert "no result in 1e-09 s" in (world.ledger[-1]["why"] or "")


async def test_a_stop_ends_a_test_without_a_result() -> None:
    world = World(0.95)
    world.stop.set()
    await world.promotion.publish(1)
    assert world.events == ["publishing"]
    assert world.done[:3] == ["write 1", "release", "discard candidate-1"]
    assert world.promotion.live_step is None
    assert not world.admission.versions.abandoned, "the policy goes on from these weights"


@pytest.mark.parametrize(("decided", "event"), [(True, "promoted"), (False, "rolled_back")])
async def test_a_person_decides_before_the_test_does(decided: bool, event: str) -> None:
    world = World(0.0 if decided else 1.0)
    world.decided = lambda: decided
    await world.promotion.publish(1)
    assert world.events == ["publishing", event]
    assert "a person decided so" in (world.ledger[-1]["why"] or "")


async def test_evaluations_without_episodes_promote_nothing() -> None:
    world = World(1.0, "evaluated")

    async def nothing(step: int, version: int | None) -> list[float]:
        return [] if version is not None else [1.0] * 10

    world.promotion.evaluate = nothing
    await world.promotion.publish(1)
    assert world.events == ["publishing", "rolled_back"]
    assert "too few episodes" in (world.ledger[-1]["why"] or "")


async def test_after_a_requested_roll_back_candidates_are_compared_with_what_is_live_then() -> None:
    world = World(1.0, "evaluated")
    live = [1.0]

    async def evaluate(step: int, version: int | None) -> list[float]:
        return [live[0] if version is None else world.rewards] * 10

    world.promotion.evaluate = evaluate
    await world.promotion.publish(1)
    live[0], world.rewards = 0.25, 0.5
    world.promotion.set_live(1)
    metrics = await world.promotion.publish(2)
    assert world.events[-1] == "promoted"
    assert (metrics["promotion/live_reward"], world.promotion.live_step) == (0.25, 2)


@pytest.mark.parametrize(("decided", "event"), [(True, "promoted"), (False, "rolled_back")])
async def test_a_person_decides_about_an_evaluated_candidate(decided: bool, event: str) -> None:
    world = World(0.0 if decided else 1.0, "evaluated")
    world.decided = lambda: decided
    await world.promotion.publish(1)
    assert world.events == ["publishing", event]
    assert "a person decided so" in (world.ledger[-1]["why"] or "")


async def test_a_candidate_that_no_engine_can_serve_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1.0, "evaluated")
    monkeypatch.setattr(module, "SERVED_S", 0.05)

    async def none_left(weights: Path, version: int) -> bool:
        return False

    monkeypatch.setattr(world, "ensure_serving", none_left)
    async with asyncio.timeout(10):
        await world.promotion.publish(1)
    assert world.events == ["publishing", "rolled_back"]
    assert "too few engines could serve it" in (world.ledger[-1]["why"] or "")


async def test_a_person_decides_about_a_candidate_that_no_engine_can_serve() -> None:
    world = World(1.0, "evaluated")

    async def none_left(weights: Path, version: int) -> bool:
        return False

    world.ensure_serving = none_left  # type: ignore[method-assign]
    world.decided = lambda: True
    async with asyncio.timeout(10):
        await world.promotion.publish(1)
    assert world.events == ["publishing", "promoted"]
