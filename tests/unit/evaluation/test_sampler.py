"""The sampler: bounded concurrency, order, retries of infrastructure failures, an end in an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tidegate.errors import GatewayError, NoUsableEpisodesError
from tidegate.evaluation import sampler as sampler_module
from tidegate.evaluation.sampler import SampledEpisode, Sampler, failed
from tidegate.types import Outcome, Task, Trajectory

SETS = {"": [Task(f"t{n}", "sums", []) for n in range(6)], "more": [Task("m0", "sums", [])]}


def graded(task: Task, reward: float = 1.0) -> Trajectory:
    return Trajectory("s", task.id, task.env, "eval", Outcome.COMPLETED, [], reward=reward)


class World:
    """Attempts as a test wants them; sees how many run at once and what was asked for."""

    def __init__(self, answer: Callable[[str, Task], Trajectory]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int]] = []
        self.running = self.most = 0
        self.kept: list[SampledEpisode] = []
        self.told: list[tuple[int, int]] = []

    async def attempt(self, name: str, task: Task, seed: int) -> Trajectory:
        self.asked.append((name, seed))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            return self.answer(name, task)
        finally:
            self.running -= 1

    def sampler(self, samples: int = 2, concurrency: int = 3, attempts: int = 3) -> Sampler:
        return Sampler(
            self.attempt, SETS, samples, concurrency, 5, attempts, self.kept.append,
            lambda done, total: self.told.append((done, total)),
        )  # fmt: skip


async def test_every_task_is_sampled_as_often_as_asked_and_never_too_many_at_once() -> None:
    world = World(lambda name, task: graded(task))
    await world.sampler().run()
    assert world.most == 3
    assert sorted((one.eval_set, one.task.id, one.sample) for one in world.kept) == sorted(
        (name, task.id, sample) for name, tasks in SETS.items() for task in tasks for sample in range(2)
    )
    assert {one.sample for one in world.kept[:5]} == {0}, "all tasks once, then again"
    assert world.told[-1] == (14, 14)


async def test_samples_have_seeds_of_their_own_the_same_in_every_evaluation() -> None:
    first, again = World(lambda name, task: graded(task)), World(lambda name, task: graded(task))
    await first.sampler().run()
    await again.sampler(concurrency=1).run()
    assert sorted(first.asked) == sorted(again.asked)
    assert len({seed for _, seed in first.asked}) == 14


async def test_infrastructure_is_tried_again_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_RETRY_S", 0.0)

    def answer(name: str, task: Task) -> Trajectory:
        number = int(name.rpartition("/")[2])
        if task.id == "t0" and number < 2:
            raise GatewayError("the gateway could not be reached")
        if task.id == "t1":
            return failed(task, Outcome.INFRA_ERROR, "the engine died\nat line 3")
        if task.id == "t2":
            return failed(task, Outcome.AGENT_ERROR, "it broke")
        if task.id == "t4" and number < 1:
            return failed(task, Outcome.CANCELLED, "the agents' process exited")
        return graded(task)

    world = World(answer)
    one = world.sampler(samples=1)
    await one.run()
    tries = {
        task: sum(f"/{task}/" in name for name, _ in world.asked) for task in ("t0", "t1", "t2", "t3", "t4")
    }
    assert tries == {"t0": 3, "t1": 3, "t2": 1, "t3": 1, "t4": 2}
    assert one.reasons == {"infra_error: the engine died": 1, "agent_error: it broke": 1}
    assert {kept.task.id: kept.trajectory.outcome.value for kept in world.kept}["t0"] == "completed"


async def test_where_everything_fails_it_stops_soon_and_says_why() -> None:
    world = World(lambda name, task: failed(task, Outcome.AGENT_ERROR, "no such model"))
    with pytest.raises(
        NoUsableEpisodesError, match="none of 16 episodes succeeded; 16 of them: agent_error: no such"
    ):
        await world.sampler(samples=50).run()
    assert len(world.asked) < 25
    assert world.running == 0


async def test_one_success_lets_the_evaluation_continue() -> None:
    def answer(name: str, task: Task) -> Trajectory:
        return graded(task) if name == "main/t3/0/0" else failed(task, Outcome.TIMEOUT, "late")

    world = World(answer)
    await world.sampler(samples=10).run()
    assert len(world.kept) == 70


async def test_an_error_of_ours_ends_it_at_once() -> None:
    def answer(name: str, task: Task) -> Trajectory:
        raise RuntimeError("a bug")

    world = World(answer)
    with pytest.raises(RuntimeError, match="a bug"):
        await world.sampler(samples=100).run()
    assert world.running == 0
