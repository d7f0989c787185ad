"""The training loop with scripted parts: what each step waits for, and the order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from tests.slow_files import slow_file
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tests.waiting import eventually
from tidegate.config import ModelSettings, Settings, TrainerSettings
from tidegate.errors import GatewayError, PublishError
from tidegate.settings import sections
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.batch.batcher import Batcher
from tidegate.trainer.batch.credit import BaselineCredit
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.loop import Loop
from tidegate.trainer.records.recorder import Recorder
from tidegate.trainer.records.trajectories import TrajectoryFiles, step_files
from tidegate.trainer.replay import batch_groups
from tidegate.types import Group, Outcome

SETTINGS = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1}
LIMIT_S = 20


@dataclass
class Hands:
    """Gateway, policy and publisher in one. While `ready` is set there is a group for every lease."""

    admission: Admission
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    one_by_one: bool = False
    log: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of metrics."""
    added: list[dict[str, Any]] = field(default_factory=list)
    """To the newest line."""
    non_finite: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)

    def add_to_last(self, metrics: dict[str, Any]) -> dict[str, Any]:
        self.added.append(metrics)
        return self.lines[-1] | metrics

    async def lease(self, *_: Any) -> list[Group]:
        await self.ready.wait()
        if self.one_by_one:
            self.ready.clear()
        group = self.admission.start_group(self.admission.cursor.next(), "t")
        assert group is not None
        for slot in range(2):
            self.admission.end_attempt(self.admission.start_attempt(group.id, slot), Outcome.COMPLETED)
        self.log.append(f"lease {group.id[-1]}")
        version = self.admission.version
        members = [make_trajectory([make_turn(0, None, [1], [2], version=version)]) for _ in range(2)]
        for slot, one in enumerate(members):
            one.session_id, one.group_id, one.slot, one.reward = f"{group.id}-{slot}", group.id, slot, slot
        return [Group(group.id, "t", members, f"l-{group.id}")]

    async def ack(self, *_: Any) -> None:
        pass

    def backward(self, rows: Sequence[TrainingSequence], version: int) -> None:
        self.log.append(f"backward {len(rows)} at {version}")
        asyncio.run_coroutine_threadsafe(self._set(), self.loop)

    async def _set(self) -> None:
        self.ready.set()

    def optimizer_step(self) -> dict[str, float]:
        self.log.append("optimizer_step")
        return {"skipped": 0.0}

    async def publish(self, version: int) -> None:
        self.log.append(f"publish {version}")

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()


def looped(tmp_path: Path, **settings: Any) -> tuple[Loop, Hands, list[LedgerEntry]]:
    book: list[LedgerEntry] = []
    trainer = TrainerSettings(**(SETTINGS | settings))
    rules = Rules.of(Settings(model=ModelSettings(path=tmp_path), trainer=trainer))
    admission = Admission(rules, book.append)
    hands = cast(Any, Hands(admission))
    nothing = SimpleNamespace(
        append=hands.lines.append, add_to_last=hands.add_to_last, step=lambda _: None, note=lambda _: None
    )
    recorder = Recorder(
        cast(Any, nothing), TrajectoryFiles(tmp_path), cast(Any, nothing), dict, lambda: admission.version
    )

    async def later(*_: int) -> dict[str, float]:
        return {}

    credit = BaselineCredit(trainer)
    batches = Batcher(
        gateway=hands, admission=admission, on_freed=lambda: None, should_train=credit.should_train
    )
    return (
        Loop(
            settings=trainer,
            admission=admission,
            batches=batches,
            policy=hands,
            publisher=hands,
            recorder=recorder,
            checkpoint=later,
            evaluate=later,
            credit=credit,
            before_publish=later,
        ),
        hands,
        book,
    )


async def test_streaming_begins_with_the_first_minibatch_and_steps_once(tmp_path: Path) -> None:
    """The second group is ready once the first was learned from: whoever waits for both waits for ever."""
    loop, hands, book = looped(tmp_path, steps=2, minibatches=2, streaming=True)
    hands.one_by_one = True
    hands.ready.set()
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    once = ["backward 2 at {0}", "lease {2}", "backward 2 at {0}", "optimizer_step", "publish {1}"]
    first, second = ([one.format(n, n + 1, 2 * n + 2) for one in once] for n in (0, 1))
    assert hands.log == ["lease 1", *first, "lease 3", *second]
    steps = [
        (one["step"], one["staleness"]) for one in book if one.get("state") == "stepped" and "step" in one
    ]
    assert steps == [(1, 0), (1, 0), (2, 0), (2, 0)]


async def test_a_step_has_its_line_also_where_the_run_ends_before_the_next(tmp_path: Path) -> None:
    loop, hands, _ = looped(tmp_path, steps=3)
    hands.ready.set()

    async def publish(version: int) -> None:
        if version == 2:
            raise PublishError("no engine")

    hands.publish = publish  # type: ignore[method-assign]
    with pytest.raises(PublishError):
        await asyncio.wait_for(loop.run(), LIMIT_S)
    assert [line["step"] for line in hands.lines] == [1, 2]
    assert "time/publish" in hands.lines[0]
    assert "time/publish" not in hands.lines[1]
    assert hands.lines[1]["reward/mean"] == 0.5


@pytest.mark.parametrize("fails", ["optimizer_step", "batch", "record_step"])
async def test_weights_of_a_step_that_is_not_recorded_are_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    loop, hands, book = looped(tmp_path, steps=2)
    assert loop.committable
    hands.ready.set()

    def fail(*_: Any) -> Any:
        assert not loop.committable
        raise OSError("no space left on device")

    owner = {"optimizer_step": hands, "batch": loop.recorder, "record_step": loop.batches}[fails]
    monkeypatch.setattr(type(owner), fails, fail)
    with pytest.raises(OSError, match="no space"):
        await asyncio.wait_for(loop.run(), LIMIT_S)
    assert (loop.step, loop.committable, hands.lines) == (0, False, [])
    assert not [one for one in book if one.get("state") == "stepped"]


async def test_a_step_has_its_line_even_if_the_gateway_cannot_be_reached(tmp_path: Path) -> None:
    loop, hands, book = looped(tmp_path, steps=3)
    hands.ready.set()

    async def ack(*_: Any) -> None:
        raise GatewayError("it died too often")

    hands.ack = ack  # type: ignore[method-assign]
    with pytest.raises(GatewayError):
        await asyncio.wait_for(loop.run(), LIMIT_S)
    assert {one["step"] for one in book if one.get("state") == "stepped" and "step" in one} == {1}
    assert [line["step"] for line in hands.lines] == [1]


async def test_a_step_in_which_the_run_is_cancelled_has_its_line(tmp_path: Path) -> None:
    loop, hands, _ = looped(tmp_path, steps=3)
    hands.ready.set()
    running = asyncio.create_task(loop.run())

    def optimizer_step() -> dict[str, float]:
        hands.loop.call_soon_threadsafe(running.cancel)
        return {"skipped": 0.0}

    hands.optimizer_step = optimizer_step  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert [line["step"] for line in hands.lines] == [1]


async def test_without_streaming_the_whole_batch_is_selected_before_training(tmp_path: Path) -> None:
    loop, hands, _ = looped(tmp_path, steps=1)
    hands.ready.set()
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    assert hands.log == ["lease 1", "lease 2", "backward 4 at 0", "optimizer_step", "publish 1"]


async def test_a_stop_between_two_minibatches_leaves_no_step(tmp_path: Path) -> None:
    loop, hands, book = looped(tmp_path, steps=2, minibatches=2, streaming=True)
    hands.one_by_one = True
    hands.ready.set()

    def backward(rows: Sequence[TrainingSequence], version: int) -> None:
        hands.log.append(f"backward {len(rows)} at {version}")
        asyncio.run_coroutine_threadsafe(stopped(), hands.loop)

    async def stopped() -> None:
        loop.stop.set()

    hands.backward = backward  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    assert hands.log == ["lease 1", "backward 2 at 0"]
    assert not [one for one in book if one["event"] == "ended"], "whoever ends the run accounts for it"


async def test_a_benchmark_never_waits_for_a_publish(tmp_path: Path) -> None:
    """Many more groups than may be in flight are trained on, all of them at the first version."""
    loop, hands, book = looped(tmp_path, steps=6, publish_interval="never", max_staleness=0)
    hands.ready.set()
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    assert loop.admission.rules.capacity == 2
    assert [one for one in hands.log if one.startswith("publish")] == []
    assert hands.log.count("optimizer_step") == 6
    assert hands.log.count("backward 4 at 0") == 1, "no token was sampled from the weights that came after"
    assert {one["event"] for one in book} == {"issued", "ended"}
    assert len(loop.admission.groups) == 0


async def test_a_step_enters_the_ledger_once_its_episodes_are_written(tmp_path: Path) -> None:
    """The file system does not respond for a while; the event loop does not wait for it."""
    loop, hands, book = looped(tmp_path, steps=1)
    hands.ready.set()
    with slow_file(tmp_path / "trajectories" / "step_000001.jsonl.part") as slow:
        running = asyncio.create_task(loop.run())
        await eventually(slow.reached.is_set)
        assert not [one for one in book if one.get("state") == "stepped"]
        slow.respond()
        await asyncio.wait_for(running, LIMIT_S)
    assert slow.content().count(b'"state":"stepped"') == 4
    assert len([one for one in book if one.get("state") == "stepped"]) == 6, "two groups of two attempts"


async def test_the_last_step_is_published_whatever_the_interval(tmp_path: Path) -> None:
    loop, hands, _ = looped(tmp_path, steps=5, publish_interval=3)
    hands.ready.set()
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    published = [hands.log[at - 1 : at + 1] for at, one in enumerate(hands.log) if one.startswith("publish")]
    assert published == [["optimizer_step", "publish 1"], ["optimizer_step", "publish 2"]]
    assert hands.log[-1] == "publish 2"


async def test_an_evaluation_that_reaches_the_target_ends_the_run(tmp_path: Path) -> None:
    loop, hands, _ = looped(tmp_path, steps=5, until=0.5, checkpoint_every=2)
    hands.ready.set()
    saved: list[int] = []

    async def evaluate(step: int, _: bool) -> dict[str, float]:
        return {"eval/reward": 0.25 * step} if step != 1 else {}

    async def checkpoint(step: int) -> None:
        saved.append(step)

    loop.evaluate, loop.checkpoint = evaluate, checkpoint
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    assert (loop.step, saved) == (2, [2])
    assert hands.log[-1] == "publish 2", "no further batch was leased"
    assert hands.lines[-1]["eval/reward"] == 0.5


@pytest.mark.parametrize("minibatches", [1, 2])
async def test_a_run_whose_tasks_are_all_solved_is_evaluated_and_ends(
    tmp_path: Path, minibatches: int
) -> None:
    """Also if half of a streamed batch was learned from."""
    loop, hands, _ = looped(tmp_path, steps=5, minibatches=minibatches, streaming=minibatches == 2)
    hands.one_by_one = minibatches == 2
    hands.ready.set()
    lease, evaluated = hands.lease, []

    async def solved_after_a_step(*_: Any) -> list[Group]:
        if loop.step and (minibatches == 1 or hands.log[-1].startswith("backward")):
            for _ in range(256):
                loop.admission.streaks.filter(solved=True, cut=False)
            return []
        return await lease()

    async def evaluate(step: int, last: bool) -> dict[str, float]:
        evaluated.append((step, last))
        return {"eval/reward": 1.0} if last else {}

    hands.lease, loop.evaluate = solved_after_a_step, evaluate  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    assert evaluated == [(1, False), (1, True)]
    assert [line["step"] for line in hands.lines] == [1]
    assert hands.added == [{"eval/reward": 1.0}]
    assert "256 of the 256 groups" in str(loop.solved)


async def test_the_last_weights_of_a_solved_run_are_published_before_their_evaluation(tmp_path: Path) -> None:
    loop, hands, _ = looped(tmp_path, steps=6, publish_interval=2)
    hands.ready.set()
    lease = hands.lease

    async def solved_after_a_step(*_: Any) -> list[Group]:
        if not loop.step:
            return await lease()
        for _ in range(256):
            loop.admission.streaks.filter(solved=True, cut=False)
        return []

    async def evaluate(step: int, last: bool) -> dict[str, float]:
        hands.log.append(f"evaluate {step}")
        return {}

    hands.lease, loop.evaluate = solved_after_a_step, evaluate  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    assert hands.log[-3:] == ["evaluate 1", "publish 1", "evaluate 1"]


async def test_groups_of_a_skipped_minibatch_end_filtered_and_the_audit_agrees(tmp_path: Path) -> None:
    """A batch in two optimiser steps, the second of which is not finite."""
    loop, hands, book = looped(
        tmp_path, steps=1, groups_per_batch=2, minibatches=2, loss={"name": "decoupled_ppo"}
    )
    hands.ready.set()
    hands.non_finite = hands.untrained = ["g1-000002"]
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    ended = {one["id"]: one["state"] for one in book if one["event"] == "ended"}
    assert ended["g1-000001"] == ended["g1-000001.0.1"] == "stepped"
    assert ended["g1-000002"] == ended["g1-000002.0.1"] == "filtered"
    assert loop.admission.groups == {}, "trained groups are published, the other one made room"
    trained = loop.batches.tokens.metrics()
    assert trained["tokens/used_total"] == trained["tokens/wasted_filtered"] == 2
    assert hands.lines[0]["selection/dropped_ratio"] == 0.5
    settings = Settings(model=ModelSettings(path=tmp_path), trainer=loop.settings)
    (tmp_path / "config.toml").write_text(sections.dump(settings), encoding="utf-8")
    (tmp_path / "ledger.jsonl").write_bytes(
        b"".join(orjson.dumps({"seq": number, **one}) + b"\n" for number, one in enumerate(book))
    )
    audit = audit_run(tmp_path)
    assert audit.findings == []
    assert (audit.steps, audit.groups) == (1, {"stepped": 1, "filtered": 1})
    assert [group.id for group in batch_groups(step_files(tmp_path)[1])] == ["g1-000001", "g1-000002"]


async def test_a_skipped_step_leaves_the_running_means_of_keys_as_they_were(tmp_path: Path) -> None:
    """A replay has the batches of the steps that were taken, and must find the same means."""
    loop, hands, _ = looped(tmp_path, steps=1, baseline="key")
    hands.ready.set()
    outcomes = iter([1.0, 0.0])

    def optimizer_step() -> dict[str, float]:
        skipped = next(outcomes)
        hands.non_finite = ["g1-000001"] if skipped else []
        return {"skipped": skipped}

    hands.optimizer_step = optimizer_step  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        await loop.run()
    trained = "two groups of two, with rewards 0 and 1"
    assert cast(BaselineCredit, loop.credit).means.state() == {"t": [4.0, 0.5]}, trained


@pytest.mark.parametrize("scale", ["none", "batch"])
@pytest.mark.parametrize("baseline", ["group", "batch", "key"])
async def test_a_reward_that_no_float_holds_drops_its_group_alone_and_says_so(
    tmp_path: Path, scale: str, baseline: str
) -> None:
    loop, hands, book = looped(tmp_path, steps=2, advantage_scale=scale, baseline=baseline)
    hands.ready.set()
    lease, told, advantages = hands.lease, [], []

    async def with_a_culprit(*arguments: Any) -> list[Group]:
        groups = await lease(*arguments)
        for group in groups:
            if group.id.endswith("2"):
                group.trajectories[0].reward = group.trajectories[1].reward = 1e308
                group.trajectories[1].turns[0].reward = -1e308
        return groups

    async def ack(epoch: int, lease_id: str, *how: Any) -> None:
        told.append((lease_id, *how))

    def backward(rows: Sequence[TrainingSequence], version: int) -> None:
        advantages.extend(float(one) for row in rows for one in np.ravel(row.advantages))

    hands.lease, hands.ack, hands.backward = with_a_culprit, ack, backward  # type: ignore[method-assign]
    await asyncio.wait_for(loop.run(), LIMIT_S)
    assert np.isfinite(advantages).all()
    assert np.any(advantages)
    filtered = [one for one in told if one[1] == "filtered"]
    assert [one[0][-1] for one in filtered] == ["2"]
    assert "add up to" in filtered[0][2]
    assert sum(one.get("state") == "stepped" for one in book) >= 2
