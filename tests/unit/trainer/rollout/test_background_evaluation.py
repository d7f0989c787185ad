"""Evaluations beside training: which engines they have, which publishes wait, and how they end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.waiting import eventually
from tidegate.config import load_settings
from tidegate.errors import ConfigError, GatewayError
from tidegate.trainer.end import RunResult
from tidegate.trainer.evaluations import RunEvaluations
from tidegate.trainer.rollout import background_evaluation as module
from tidegate.trainer.rollout.background_evaluation import BackgroundEvaluation
from tidegate.trainer.rollout.evaluator import Evaluation


class World:
    """Publisher, engines and evaluator; evaluations last until `over` is set."""

    def __init__(self, engines: int = 0, *, held: bool = True, max_versions: int = 2) -> None:
        self.current = (Path("v1"), 1)
        self.kept: Path | None = None
        self.reserved: set[str] = set()
        self.pinned: set[str] = set()
        self.held, self.failures = held, 0
        self.over = asyncio.Event()
        self.asked: list[tuple[int, int | None]] = []
        self.notes: list[str] = []
        self.metrics = {"eval/reward": 0.5}
        world = cast(Any, self)
        self.beside = BackgroundEvaluation(
            evaluate=self.evaluate,
            publisher=world,
            engines=world,
            reserved_engines=world if engines else None,
            max_versions=max_versions,
            note=self.notes.append,
        )

    async def files(self) -> tuple[Path, int]:
        return self.current

    async def evaluate(self, step: int, version: int | None) -> Evaluation:
        self.asked.append((step, version))
        await self.over.wait()
        return Evaluation(dict(self.metrics), [], Counter())

    async def ensure_serving(self, weights: Path, version: int) -> bool:
        self.reserved.add("engine")
        return self.held

    async def release(self) -> None:
        if self.failures:
            self.failures -= 1
            raise GatewayError("restarting")
        self.reserved.clear()


async def test_without_engines_of_its_own_a_publish_waits_before_it_spans_too_many_versions() -> None:
    world = World(max_versions=2)
    await world.beside.start(4)
    await world.beside.before_publish(2)
    waiting = asyncio.create_task(world.beside.before_publish(3))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    assert await world.beside.collect(wait=False) is None
    world.over.set()
    await waiting
    ended = await world.beside.collect(wait=True)
    assert ended is not None
    assert (ended.step, ended.version, ended.weights, world.asked) == (4, 1, Path("v1"), [(4, None)])
    await world.beside.before_publish(9)


async def test_engines_of_its_own_keep_the_version_and_no_publish_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    world = World(engines=1)
    await world.beside.start(4)
    assert (world.pinned, world.kept) == ({"engine"}, Path("v1"))
    await world.beside.before_publish(99)
    world.failures = 2
    world.over.set()
    assert await world.beside.collect(wait=True) is not None
    assert (world.asked, world.pinned, world.reserved, world.kept) == ([(4, 1)], set(), set(), None)


async def test_too_few_engines_leave_the_evaluation_on_all_of_them() -> None:
    world = World(engines=1, held=False)
    await world.beside.start(4)
    assert (world.reserved, world.pinned) == (set(), set())
    assert "too few engines are in service" in world.notes[0]
    world.over.set()
    await world.beside.collect(wait=True)
    assert world.asked == [(4, None)]


async def test_an_evaluation_that_is_not_wanted_any_more_returns_its_engines() -> None:
    world = World(engines=1)
    await world.beside.start(4)
    await eventually(lambda: bool(world.asked))
    await world.beside.close()
    assert (world.reserved, world.pinned) == (set(), set())


class Evaluator:
    """Evaluations are due after every second step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ended: list[str] = []

    def due(self, step: int) -> bool:
        return step % 2 == 0

    async def interim(self, step: int) -> Evaluation | None:
        self.ended.append(f"interim {step}")
        return Evaluation({"eval/reward": 0.7}, [], Counter()) if self.due(step) else None

    async def full(self, step: int) -> Evaluation:
        self.ended.append(f"full {step}")
        return Evaluation({"eval/reward": 0.9}, [], Counter())


Make = Callable[..., tuple[RunEvaluations, World, Evaluator]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def evaluations(*words: str, beside: bool = True) -> tuple[RunEvaluations, World, Evaluator]:
        settings = load_settings(None, ["--model.path=m", "--trainer.steps=6", "--eval.every=2", *words])
        world = World()
        evaluator, made = Evaluator(world), cast(Any, world)

        async def stop_rollout() -> None:
            evaluator.ended.append("stop")

        async def record(step: int, _: dict[str, float]) -> None:
            evaluator.ended.append(f"line {step}")

        best = cast(Any, Best())
        return RunEvaluations(
            settings=settings, evaluator=cast(Any, evaluator), publisher=made,
            beside=world.beside if beside else None, best=best,
            stop_rollout=stop_rollout, record=record, note=world.notes.append, stop=asyncio.Event(),
            result=RunResult("failed", None, 0),
        ), world, evaluator  # fmt: skip

    return evaluations


class Best:
    def __init__(self) -> None:
        self.seen: list[tuple[Path, int, int, float]] = []

    def update_if_better(self, weights: Path, step: int, version: int, reward: float) -> bool:
        self.seen.append((weights, step, version, reward))
        return True


async def test_training_goes_on_and_a_later_line_has_the_scores(make: Make) -> None:
    evaluations, world, evaluator = make()
    assert await evaluations.after(1, last=False) == {}
    assert await evaluations.after(2, last=False) == {}
    world.current = (Path("v2"), 2)
    assert await evaluations.after(3, last=False) == {}
    world.over.set()
    await eventually(lambda: world.beside._task is not None and world.beside._task.done())
    assert await evaluations.after(3, last=False) == {"eval/reward": 0.5, "eval/step": 2.0}
    assert cast(Any, evaluations.best).seen == [(Path("v1"), 2, 1, 0.5)]
    assert await evaluations.after(4, last=False) == {}
    assert await evaluations.after(6, last=True) == {"eval/reward": 0.9}, (
        "the last evaluation waits for the one before"
    )
    assert evaluator.ended == ["stop", "full 6"]
    assert world.asked == [(2, None), (4, None)]
    assert "held-out reward after step 4: 0.500" in world.notes


async def test_a_target_that_is_reached_begins_no_further_evaluation(make: Make) -> None:
    evaluations, world, _ = make("--trainer.until=0.4")
    await evaluations.after(2, last=False)
    world.over.set()
    assert (await evaluations.after(4, last=False))["eval/step"] == 2.0
    assert world.beside._task is None


@pytest.mark.parametrize(
    ("words", "first", "last"),
    [
        ([], ["full 0", "line 0"], ["stop", "full 6"]),
        (["--eval.first=false"], [], ["stop", "full 6"]),
        (["--eval.last=false"], ["full 0", "line 0"], ["interim 6"]),
    ],
)
async def test_the_first_and_the_last_evaluation_can_be_switched_off(
    make: Make, words: list[str], first: list[str], last: list[str]
) -> None:
    evaluations, _, evaluator = make(*words, beside=False)
    evaluator_full = evaluator.full

    async def full(step: int) -> Evaluation:
        evaluation = await evaluator_full(step)
        evaluation.episodes.append(("", "sampled", cast(Any, SimpleNamespace(reward=1.0))))
        return evaluation

    evaluator.full = full  # type: ignore[method-assign]
    await evaluations.first()
    assert evaluator.ended == first
    evaluator.ended.clear()
    await evaluations.after(6, last=True)
    assert evaluator.ended == last
    await evaluations.after(6, last=True)  # nothing is left to learn behind a step that was evaluated
    assert evaluator.ended == (last if "--eval.last=false" in words else last * 2)


BESIDE = ["--eval.beside_training=true", "--eval.engines=1"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--eval.engines=1"], "engines has no effect without beside_training"),
        (["--eval.max_versions=3"], "max_versions has no effect without beside_training"),
        (["--eval.beside_training=true", "--eval.every=0"], "beside_training has no effect without eval"),
        (BESIDE, "eval.engines = 1 needs more than 1 engines, and there are 1"),
        ([*BESIDE, "--engine.count=2", "--gateway.shards=2"], "needs gateway.shards = 1, not 2"),
        (
            [*BESIDE, "--engine.count=2", "--trainer.publish_transport=broadcast"],
            'publish_transport = "files"',
        ),
        ([*BESIDE, "--engine.count=3", "--trainer.promotion.mode=evaluated"], "reserves engines itself"),
    ],
)
def test_settings_that_contradict_each_other(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, ["--model.path=m", *words])
    assert why in str(refused.value)
