"""A training loop of one's own, with a scripted gateway and engine: its groups, and what it commits."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    GatewayError,
    StartError,
    TrainingError,
)
from tidegate.trainer import own
from tidegate.trainer.own import OwnTrainer
from tidegate.types import Group


class World:
    """The gateway, and an engine with `version`."""

    def __init__(self) -> None:
        self.version = 5
        self.ready: list[Group] = []
        self.acks: list[tuple[str, str]] = []
        self.epochs: list[int] = []
        self.loaded: list[tuple[str, int]] = []
        self.unreachable = self.resumed = 0
        self.url = "http://engine"

    async def begin_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    async def add_engine(self, url: str) -> None: ...

    async def lease(self, epoch: int, number: int, wait_s: float) -> list[Group]:
        leased, self.ready = self.ready[:number], self.ready[number:]
        assert leased or not wait_s, "it waits for ever"
        return leased

    async def ack(self, epoch: int, lease_id: str, state: str, why: str) -> None:
        self.acks.append((lease_id, f"{state}: {why}"))

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def load(self, weights: Path, version: int) -> None:
        self.version = version
        self.loaded.append((weights.parent.name, version))


class Engine:
    def __init__(self, world: World, url: str) -> None:
        self.url, self.world, self.load = url, world, world.load

    async def try_resume(self) -> None:
        self.world.resumed += 1

    async def version(self) -> int:
        if self.world.unreachable:
            self.world.unreachable -= 1
            raise EngineError("no connection", retryable=True)
        return self.world.version


def group(name: str, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    members = [make_trajectory([make_turn(0, None, [1], [2], version=version)]) for _ in rewards]
    for member, reward in zip(members, rewards, strict=True):
        member.reward = reward
    return Group(name, "t", members, name)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(own, "GatewayClient", lambda *_: world)
    monkeypatch.setattr(own, "EngineControl", lambda url, _: Engine(world, url))
    monkeypatch.setattr(own, "backoff_s", lambda *_: 0.0)
    return world


def save(path: Path) -> None:
    (path / "model").mkdir()


def names(groups: list[Group]) -> list[str]:
    return [group.id for group in groups]


async def test_groups_beyond_the_bound_and_without_a_gradient_are_ended(world: World, tmp_path: Path) -> None:
    world.ready = [
        group("old", 2), group("oldest-allowed", 3), group("equal", 5, (1.0, 1.0)), group("of-another", 6),
        Group("mixed", "t", [*group("", 5).trajectories, *group("", 6).trajectories], "mixed"),
        group("new", 5),
    ]  # fmt: skip
    async with OwnTrainer("http://gateway", [world.url], tmp_path, max_staleness=2) as trainer:
        assert names(await trainer.batch(2)) == ["oldest-allowed", "new"]
    assert world.acks == [
        ("old", "stale: its oldest token is 3 versions old, the bound is 2"),
        ("equal", "filtered: the loop did not want it"),
        ("of-another", "stale: it has tokens of version 6, which another trainer published after 5"),
        ("mixed", "stale: it has tokens of version 6, which another trainer published after 5"),
    ]


async def test_a_step_is_committed_before_its_groups_end_and_its_weights_are_published(
    world: World, tmp_path: Path
) -> None:
    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        for number in range(3):
            world.ready = [group(f"g{number}", world.version)]
            await trainer.commit(await trainer.batch(1), save)
    assert world.loaded == [("step_000001", 6), ("step_000002", 7), ("step_000003", 8)]
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step_")) == [
        "step_000002",
        "step_000003",
    ]
    world.version = 0  # the engine was restarted
    world.ready = [group("g2", 7), group("g3", 8)]  # the acknowledgement of g2 was lost
    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        assert (trainer.step, trainer.version, world.version) == (3, 8, 8)
        assert world.acks[-1] == ("g2", "stepped: step 3"), "also if no batch follows"
        assert names(await trainer.batch(1)) == ["g3"]
    assert world.epochs[0] < world.epochs[-1]
    assert world.resumed == 2, "a loop that was killed while it published left the engine paused"


async def test_what_was_not_committed_is_forgotten(world: World, tmp_path: Path) -> None:
    (tmp_path / ".step_000001").mkdir()
    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        with pytest.raises(CheckpointError, match=r"wrote no directory .*model"):
            await trainer.commit([], lambda path: None)
        assert (trainer.step, trainer.checkpoint, world.loaded) == (0, None, [])


async def test_a_step_that_cannot_be_read_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / "step_999999").mkdir()  # the one before
    (tmp_path / "step_1000000").mkdir()
    (tmp_path / "step_1000000" / "step.json").write_text(json.dumps({"step": 10**6}))
    with pytest.raises(CheckpointError, match=r"step\.json cannot be read .*remove .*step_1000000"):
        await OwnTrainer("http://gateway", [world.url], tmp_path).__aenter__()
    (tmp_path / "step_1000000" / "step.json").unlink()
    for step in (999_999, 1_000_000):
        (tmp_path / f"step_{step}").rmdir()
    async with OwnTrainer("http://gateway", [world.url], tmp_path):
        with pytest.raises(StartError, match="an own loop"):  # the lock of the one that failed was released
            await OwnTrainer("http://gateway", [world.url], tmp_path).__aenter__()


async def test_groups_of_a_batch_that_was_given_up_come_with_the_next(world: World, tmp_path: Path) -> None:
    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        world.ready = [group("a", 5), group("b", 5)]
        with pytest.raises(AssertionError, match="waits for ever"):
            await trainer.batch(3)
        world.ready = [group("c", 5)]
        assert names(await trainer.batch(3)) == ["a", "b", "c"]


async def test_a_commit_that_is_cancelled_while_it_saves_is_complete(world: World, tmp_path: Path) -> None:
    saving, go_on = threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        saving.set()
        assert go_on.wait(10)
        save(path)

    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        world.ready = [group("a", 5)]
        commit = asyncio.create_task(trainer.commit(await trainer.batch(1), slow))
        await asyncio.to_thread(saving.wait, 10)
        commit.cancel()
        await asyncio.sleep(0)
        commit.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert (trainer.step, world.acks, world.loaded) == (1, [], [])
    world.ready = [group("a", 5), group("b", 5)]  # the next loop is given the leases that have not ended
    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        assert (trainer.step, world.acks, world.loaded) == (
            1,
            [("a", "stepped: step 1")],
            [("step_000001", 6)],
        )
        assert names(await trainer.batch(1)) == ["b"]


async def test_a_loop_that_ends_between_two_acknowledgements_sends_the_other(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    def reach(name: str) -> None:
        if name == "own.ended" and len(world.acks) == 1:
            raise Killed

    monkeypatch.setattr("tidegate.failpoints.reach", reach)
    world.ready = [group("a", 5), group("b", 5)]
    with pytest.raises(Killed):
        async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
            await trainer.commit(await trainer.batch(2), save)
    assert world.acks == [("a", "stepped: step 1")]
    world.ready = [group("b", 5)]
    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        assert trainer.step == 1
    assert world.acks == [("a", "stepped: step 1"), ("b", "stepped: step 1")]


async def test_a_batch_that_became_too_old_is_not_committed(world: World, tmp_path: Path) -> None:
    async with OwnTrainer("http://gateway", [world.url], tmp_path, max_staleness=0) as trainer:
        world.ready = [group("a", 5), group("b", 5)]
        first, second = await trainer.batch(1), await trainer.batch(1)
        await trainer.commit(first, save)
        with pytest.raises(TrainingError, match="groups b are beyond the bound of 0 versions"):
            await trainer.commit(second, save)
        assert trainer.step == 1


async def test_a_loop_that_was_replaced_publishes_and_commits_nothing(world: World, tmp_path: Path) -> None:
    async def replaced(_: int) -> None:
        raise GatewayError("a newer trainer took over", status=410)

    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        world.ready = [group("a", 5)]
        batch = await trainer.batch(1)
        world.begin_epoch = replaced  # type: ignore[method-assign]
        world.version = 9
        with pytest.raises(GatewayError):
            await trainer.batch(1)
        with pytest.raises(GatewayError):
            await trainer.commit(batch, save)
        assert (trainer.step, world.loaded) == (0, [])


async def test_an_engine_that_is_restarting_is_called_again(world: World, tmp_path: Path) -> None:
    world.unreachable = 3
    async with OwnTrainer("http://gateway", [world.url], tmp_path) as trainer:
        assert trainer.version == 5


async def test_engines_with_different_weights_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter([1, 2])

    async def version(_: Any) -> int:
        return next(versions)

    monkeypatch.setattr(Engine, "version", version)
    with pytest.raises(ConfigError, match=r"a, b have the versions \[1, 2\]"):
        async with asyncio.timeout(10):
            await OwnTrainer("http://gateway", ["a", "b"], tmp_path).__aenter__()


def test_rewards_differ() -> None:
    assert own.rewards_differ(group("g", 1))
    assert not own.rewards_differ(group("g", 1, (0.5, 0.5)))
    untrained = group("g", 1)
    for member in untrained.trajectories:
        member.turns = []
    assert not own.rewards_differ(untrained)


def test_rewards_of_a_policy_differ_where_their_means_do_not() -> None:
    won_and_lost = group("g", 1, (0.0, 0.0))
    for member, reward in zip(won_and_lost.trajectories, (1.0, -1.0), strict=True):
        member.policy_rewards = {"seller": reward, "buyer": -reward}
    assert not own.rewards_differ(won_and_lost), "no turn is of a policy that has a reward of its own"
    for member in won_and_lost.trajectories:
        for turn in member.turns:
            turn.policy = "seller"
    assert own.rewards_differ(won_and_lost)
