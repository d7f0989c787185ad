"""Rollout with a scripted gateway and worker: retries, drops, staleness, stop, repeated failure."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.slow_files import slow_file
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tests.waiting import eventually
from tidegate.config import load_settings
from tidegate.errors import GatewayError, NoUsableEpisodesError, OutageError, TrainingError
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.dead_letters import DeadLetters
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.records.writer import FileWriter
from tidegate.trainer.rollout import pause as pauses
from tidegate.trainer.rollout import rollout as module
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.trainer.rollout.pause import Pause
from tidegate.trainer.rollout.rollout import Rollout
from tidegate.types import Outcome, Task, Trajectory

EPOCH = 3


@dataclass
class Script:
    """Stands for the gateway. `outcome(attempt)` says how an attempt ends; `hold` keeps it open."""

    outcome: Callable[[str], Outcome] = lambda _: Outcome.COMPLETED
    hold: asyncio.Event | None = None
    until: dict[str, asyncio.Event] = field(default_factory=dict)
    """What single attempts wait for."""
    sealed: dict[str, list[str]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    cancelled: int = 0
    kept: list[tuple[str, str]] = field(default_factory=list)
    """Attempt and state of each episode that was recorded as lost."""
    deleted: set[str] = field(default_factory=set)
    letters: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unranked: Callable[[str], str | None] = lambda _: None
    """Why a group cannot be ranked."""
    broken: bool = False
    listed: int = 0
    """Number of likeliest ids that the newest session asks for."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def open_session(self, **arguments: Any) -> Any:
        if self.broken:
            raise GatewayError("the gateway is away")
        assert arguments["epoch"] == EPOCH
        attempt = arguments["metadata"]["attempt"]
        self.opened.append(attempt)
        self.seeds.append(arguments["seed"])
        self.listed = arguments["sampling"].top_logprobs
        self.changed.set()
        return SimpleNamespace(session_id=f"s-{attempt}", base_url="", api_key="")

    async def result(self, session_id: str) -> Any:
        name = session_id.removeprefix("s-")
        try:
            if (hold := self.until.get(name, self.hold)) is not None:
                await hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.changed.set()
            raise
        found = self.outcome(name)
        return SimpleNamespace(
            outcome=found, error=str(found), sampled_tokens=3, session_id=session_id, engine_wait_s=0.0
        )

    async def trajectory(self, session_id: str) -> Trajectory:
        found = make_trajectory([make_turn(0, None, [1], [2, 3, 4])])
        found.session_id, found.metadata = session_id, {"attempt": session_id.removeprefix("s-")}
        return found

    async def delete_session(self, session_id: str) -> None:
        self.deleted.add(session_id)

    async def seal_group(self, group_id: str, _: str, sessions: list[str], epoch: int | None) -> str | None:
        assert epoch == EPOCH
        self.changed.set()
        if (why := self.unranked(group_id)) is None:
            self.sealed[group_id] = sessions
        return why

    async def drop_group(self, group_id: str, epoch: int | None, why: str | None = None) -> list[Trajectory]:
        assert epoch == EPOCH
        self.dropped.append(group_id)
        self.changed.set()
        sessions = {f"s-{one}" for one in self.opened if one.startswith(f"{group_id}.")} - self.deleted
        self.deleted |= sessions
        return [await self.trajectory(one) for one in sorted(sessions)]

    async def list_groups(self) -> list[Any]:
        groups = sorted({one.split(".")[0] for one in self.opened})
        return [SimpleNamespace(id=group, oldest_version=0) for group in groups]


class Tasks:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def train_task(self, index: int) -> Task:
        self.asked.append(index)
        return Task(f"t{index}", "arithmetic", [], f"answer {index}")


@dataclass
class Stage:
    rollout: Rollout
    core: Admission
    book: list[Any]
    script: Script

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Drive the rollout until something holds; its own error is raised."""
        async with self.running() as rollout:
            await self.settle(rollout, wanted)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        rollout = asyncio.create_task(self.rollout.run())
        try:
            yield rollout
        finally:
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)

    async def settle(self, rollout: asyncio.Task[None], wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not wanted():
                self.script.changed.clear()
                waiting = asyncio.create_task(self.script.changed.wait())
                await asyncio.wait([rollout, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if rollout.done():
                    await rollout


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], Stage]:
    monkeypatch.setattr(pauses, "BACKOFF_S", 0.0)

    def build(script: Script, **changes: Any) -> Stage:
        settings = load_settings(None, ["--model.path=x", "--trainer.loss.score_centering=8"])
        rules = Rules(
            **({"groups_per_batch": 2, "group_size": 2, "min_group_size": 2, "max_staleness": 0} | changes)
        )
        book: list[Any] = []
        core = Admission(rules, book.append)
        episodes = EpisodeSource(cast(Any, script), 5.0, epoch=EPOCH)

        async def keep(episodes: Sequence[Trajectory], state: State) -> None:
            script.kept += [(one.metadata["attempt"], state.value) for one in episodes]

        async def letter(*told: Any) -> None:
            script.letters.append((*told, len(book)))

        pause = Pause(admission=core, note=script.notes.append, limit_s=3600.0)
        return Stage(
            Rollout(
                settings=settings,
                admission=core,
                episodes=episodes,
                tasks=Tasks(),
                save=keep,
                dead_letter=letter,
                pause=pause,
            ),
            core,
            book,
            script,
        )

    return build


async def test_an_environment_that_gives_no_task_stops_the_run_and_says_so(
    make: Callable[..., Stage],
) -> None:
    class Ending(Tasks):
        def train_task(self, index: int) -> Task:
            return [super().train_task(0)][index]

    stage = make(Script())
    stage.rollout.tasks = Ending()
    with pytest.raises(TrainingError, match=r"no training task 1: IndexError\('list index"):
        await stage.until(lambda: False)


async def test_groups_fill_the_gate_and_are_sealed_with_their_sessions(make: Callable[..., Stage]) -> None:
    stage = make(Script())
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: len(stage.script.sealed) == 2)
        groups = list(stage.core.groups.values())
    assert stage.script.sealed["g1-000001"] == ["s-g1-000001.0.1", "s-g1-000001.1.1"]
    assert len(stage.script.opened) == 4, "the gate admits two groups of two, and no more"
    assert stage.rollout.sampled_tokens == 12
    assert [stage.rollout.answer(group) for group in groups] == ["answer 0", "answer 1"]
    assert stage.rollout.tasks.asked == [0, 1], "each task is made once, and its answer kept for the lease"
    assert stage.rollout.sessions == {}


async def test_a_failed_slot_is_attempted_again_as_a_new_session(make: Callable[..., Stage]) -> None:
    stage = make(Script(lambda name: Outcome.TIMEOUT if name == "g1-000001.0.1" else Outcome.COMPLETED))
    await stage.until(lambda: len(stage.script.sealed) == 2)
    assert stage.script.sealed["g1-000001"] == ["s-g1-000001.0.2", "s-g1-000001.1.1"]
    assert stage.script.kept == [("g1-000001.0.1", "failed")]
    assert len(set(stage.script.seeds)) == len(stage.script.opened), "each attempt has a seed of its own"
    assert stage.script.listed == 8


async def test_a_group_that_fails_is_dropped_and_its_task_never_served_again(
    make: Callable[..., Stage],
) -> None:
    stage = make(Script(lambda name: Outcome.AGENT_ERROR if "g1-000001" in name else Outcome.COMPLETED))
    await stage.until(lambda: len(stage.script.sealed) == 2)
    assert stage.script.dropped[0] == "g1-000001"
    assert stage.core.failures.quarantined == {"t0"}
    tries = Counter(one.rpartition(".")[0] for one in stage.script.opened)
    assert max(tries.values()) == stage.core.rules.max_attempts


async def test_a_quarantined_task_has_one_dead_letter_with_the_reason(make: Callable[..., Stage]) -> None:
    stage = make(Script(lambda name: Outcome.TIMEOUT if "g1-000001" in name else Outcome.COMPLETED))
    await stage.until(lambda: len(stage.script.sealed) == 2)
    ((task, group, slot, attempts, entered),) = stage.script.letters
    assert (task.id, group) == ("t0", "g1-000001")
    assert [one.attempt for one in attempts] == [f"g1-000001.{slot}.{n}" for n in (1, 2, 3)]
    assert {(one.outcome, one.why) for one in attempts} == {(Outcome.TIMEOUT, "timeout")}
    assert "quarantined" in {one["event"] for one in stage.book[entered:]}, "the letter comes first"


async def test_other_groups_go_on_while_a_failed_episode_is_written(
    make: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = make(Script(lambda name: Outcome.TIMEOUT if name == "g1-000001.0.1" else Outcome.COMPLETED))
    files = TrajectoryFiles(tmp_path)
    async with FileWriter() as writer:
        stage.rollout.save = partial(writer.run, files.append)
        with slow_file(files.directory / "failed.jsonl") as slow:
            async with stage.running() as rollout:
                await stage.settle(rollout, lambda: "g1-000002" in stage.script.sealed)
                await eventually(slow.reached.is_set)
                assert "s-g1-000001.0.1" not in stage.script.deleted, "the gateway keeps it meanwhile"
                slow.respond()
                await stage.settle(rollout, lambda: "g1-000001" in stage.script.sealed)
    assert b"g1-000001.0.1" in slow.content()


async def test_a_task_is_quarantined_once_its_dead_letter_is_written(
    make: Callable[..., Stage], tmp_path: Path
) -> None:
    """Both slots fail for the last time while the file system does not respond: the task has one letter."""
    stage = make(
        Script(lambda name: Outcome.TIMEOUT if "g1-000001" in name else Outcome.COMPLETED), max_attempts=1
    )
    letters = DeadLetters(tmp_path)
    async with FileWriter() as writer:
        stage.rollout.dead_letter = partial(writer.run, letters.write)
        with slow_file(letters.path) as slow:
            async with stage.running() as rollout:
                await eventually(slow.reached.is_set)
                assert "quarantined" not in {one["event"] for one in stage.book}
                slow.respond()
                await stage.settle(rollout, lambda: len(stage.script.sealed) == 2)
    assert slow.content().count(b"\n") == 1
    assert [one["task"] for one in stage.book if one["event"] == "quarantined"] == ["t0"]


async def test_all_episodes_of_a_failed_group_are_saved_though_the_run_ends(
    make: Callable[..., Stage],
) -> None:
    stage = make(
        Script(lambda name: Outcome.AGENT_ERROR if name == "g1-000001.2.1" else Outcome.COMPLETED),
        group_size=3, min_group_size=3, max_attempts=1,
    )  # fmt: skip
    stage.script.until["g1-000001.2.1"] = others_done = asyncio.Event()
    reached, goes_on, save = asyncio.Event(), asyncio.Event(), stage.rollout.save

    async def slow(episodes: Sequence[Trajectory], state: State) -> None:
        if "g1-000001.0.1" in [one.metadata["attempt"] for one in episodes]:
            reached.set()
            await goes_on.wait()
        await save(episodes, state)

    stage.rollout.save = slow
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: "g1-000002" in stage.script.sealed)
        others_done.set()
        await asyncio.wait_for(reached.wait(), 10)
        rollout.cancel()
        await asyncio.sleep(0)
        goes_on.set()
    assert {attempt for attempt, _ in stage.script.kept} == {f"g1-000001.{slot}.1" for slot in range(3)}


async def test_failed_slots_wait_longer_each_time(
    make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(module, "backoff_s", lambda failures, *_: waits.append(failures) or 0.0)
    stage = make(Script(lambda name: Outcome.TIMEOUT if "000001.0." in name else Outcome.COMPLETED))
    await stage.until(lambda: len(stage.script.sealed) == 2)
    assert waits == [1, 2], "after the third attempt nothing is waited for"


def test_the_back_off_doubles_up_to_a_bound_and_spreads() -> None:
    rng = random.Random(0)
    for failures, longest in [(0, 0.5), (1, 0.5), (2, 1.0), (5, 8.0), (50, 8.0)]:
        drawn = [pauses.backoff_s(failures, rng) for _ in range(200)]
        assert longest / 2 <= min(drawn) < 0.55 * longest
        assert 0.95 * longest < max(drawn) <= longest


async def test_when_everything_fails_it_says_so_with_the_last_reason(make: Callable[..., Stage]) -> None:
    stage = make(Script(lambda _: Outcome.AGENT_ERROR))
    with pytest.raises(NoUsableEpisodesError, match=r"the last 8 groups all failed.*agent_error"):
        await stage.until(lambda: False)


async def test_a_group_without_a_ranking_fails_with_all_its_episodes(make: Callable[..., Stage]) -> None:
    stage = make(Script(unranked=lambda group: "the judge is away" if group == "g1-000001" else None))
    await stage.until(lambda: len(stage.script.sealed) == 2)
    assert "g1-000001" not in stage.script.sealed
    assert stage.script.dropped[0] == "g1-000001"
    assert sorted(stage.script.kept) == [("g1-000001.0.1", "failed"), ("g1-000001.1.1", "failed")]
    ends = [line for line in stage.book if line["event"] == "ended" and "g1-000001" in line["id"]]
    assert [(line["kind"], line["state"], line.get("outcome")) for line in ends] == [
        ("attempt", "failed", "reward_error"),
        ("attempt", "failed", "reward_error"),
        ("group", "failed", None),
    ]
    assert stage.core.failures.quarantined == set(), "the task is not to blame"
    assert stage.core.streaks.no_progress_reason() is None


async def test_a_judge_that_ranks_nothing_stops_the_run(make: Callable[..., Stage]) -> None:
    stage = make(Script(unranked=lambda _: "the judge is away"))
    with pytest.raises(NoUsableEpisodesError, match=r"the last 8 groups could not be ranked.*judge is away"):
        await stage.until(lambda: False)
    assert stage.script.sealed == {}


async def test_an_outage_pauses_the_run_and_spends_no_task(make: Callable[..., Stage]) -> None:
    script = Script(lambda _: Outcome.INFRA_ERROR)
    stage = make(script, groups_per_batch=4)
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: len(script.opened) > 40)
        assert stage.rollout.pause.active
        with pytest.raises(OutageError, match=r"8 of the last 8 attempts.*continue with --resume"):
            replace(stage.rollout.pause, limit_s=-1.0).check()
        script.outcome = lambda _: Outcome.COMPLETED
        await stage.settle(rollout, lambda: len(script.sealed) == 4)
    assert stage.core.failures.quarantined == set()
    assert stage.core.group_counts["failed"] == 0
    assert script.letters == []
    assert "ended infra_error" in script.notes[0]
    assert script.notes[1].startswith("resumed")
    assert stage.rollout.pause.metrics()["outage/count"] == 1


async def test_while_no_engine_serves_no_attempt_starts(make: Callable[..., Stage]) -> None:
    stage = make(Script())
    stage.rollout.pause.set_serving(False)
    async with stage.running() as rollout:
        while stage.rollout._wake.is_set():  # noqa: ASYNC110 - as it looks it starts at once what it may
            await asyncio.sleep(0)
        assert (stage.script.opened, stage.core.groups) == ([], {})
        stage.rollout.pause.set_serving(True)
        stage.rollout.wake()
        await stage.settle(rollout, lambda: len(stage.script.sealed) == 2)


async def test_a_gateway_that_is_away_is_an_infra_error_of_the_attempt(make: Callable[..., Stage]) -> None:
    stage = make(Script(broken=True))
    async with stage.running():
        async with asyncio.timeout(10):
            while "the gateway is away" not in stage.rollout.last_failure:  # noqa: ASYNC110 - tells nobody
                await asyncio.sleep(0)
    assert {one["outcome"] for one in stage.book if one["event"] == "ended" and one["kind"] == "attempt"} <= {
        "infra_error", "cancelled",
    }  # fmt: skip


async def test_groups_that_a_publish_makes_stale_end_and_are_aborted(make: Callable[..., Stage]) -> None:
    stage = make(Script(hold=asyncio.Event()))
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: len(stage.script.opened) == 4)
        version = stage.core.versions.reserve(1)
        await stage.rollout.cancel_stale(version)
        stage.core.mark_live(version)
        assert stage.core.group_counts["stale"] == 2
        assert stage.script.dropped == ["g1-000001", "g1-000002"]
        assert stage.script.kept == [(one, "stale") for one in sorted(stage.script.opened[:4])]
        await stage.settle(rollout, lambda: stage.script.cancelled == 4 and len(stage.script.opened) == 8)
    replaced = [one["replaces"] for one in stage.book if one["kind"] == "group" and one["event"] == "issued"]
    assert replaced == [None, None, "g1-000001", "g1-000002"]


async def test_episodes_that_are_lost_have_the_answer_of_their_task(make: Callable[..., Stage]) -> None:
    """One that failed, the members of a group that failed with it, and of one that went stale."""
    stage = make(Script(lambda name: Outcome.TIMEOUT if "g1-000001.0." in name else Outcome.COMPLETED))
    kept: list[tuple[str, str, Any]] = []

    async def keep(episodes: Sequence[Trajectory], state: State) -> None:
        kept.extend((one.metadata["attempt"], state, one.answer) for one in episodes)

    stage.rollout.save = keep
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: {"g1-000002", "g1-000003"} <= set(stage.script.sealed))
        await stage.rollout.end_stale(3, {"g1-000003": 0})
    assert {name[:9]: (state, answer) for name, state, answer in kept} == {
        "g1-000001": ("failed", "answer 0"),
        "g1-000003": ("stale", "answer 2"),
    }
    assert "g1-000001.1.1" in {name for name, _, _ in kept}, "it had succeeded"


async def test_a_slow_episode_does_not_hold_the_places_of_its_group(make: Callable[..., Stage]) -> None:
    slow = asyncio.Event()
    script = Script(until={"g1-000001.0.1": slow})
    stage = make(script, max_running=3)
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: "g1-000002" in script.sealed)
        assert "g1-000001" not in script.sealed
        slow.set()
        await stage.settle(rollout, lambda: "g1-000001" in script.sealed)


async def test_stopping_cancels_what_runs_and_leaves_nothing_live(make: Callable[..., Stage]) -> None:
    stage = make(Script(hold=asyncio.Event()))
    await stage.until(lambda: len(stage.script.opened) == 4)
    assert stage.script.cancelled == 4
    assert stage.core.group_counts["cancelled"] == 2
    assert stage.core.attempt_counts["live"] == 0
    assert stage.rollout.sessions == {}


async def test_after_the_last_step_nothing_starts_in_the_place_of_what_ends(
    make: Callable[..., Stage],
) -> None:
    """Nothing but `stop` says so where groups may be filtered: nobody knows how many more it takes."""
    stage = make(Script(hold=asyncio.Event()))
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: len(stage.script.opened) == 4)
        await stage.rollout.stop()
        stage.rollout.wake()
        while stage.rollout._wake.is_set():  # noqa: ASYNC110 - as it looks it starts at once what it may
            await asyncio.sleep(0)
        assert not rollout.done()
        assert stage.core.groups == {}
    assert stage.core.group_counts["cancelled"] == 2


async def test_wasted_tokens_are_counted_by_cause(make: Callable[..., Stage]) -> None:
    stage = make(Script(lambda name: Outcome.TIMEOUT if name == "g1-000001.0.1" else Outcome.COMPLETED))
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: len(stage.script.sealed) == 2)
        assert stage.rollout.tokens.wasted == {"failed": 3}, "the attempt that was repeated"
        await stage.rollout.end_stale(3, {"g1-000001": 0})
        assert stage.rollout.tokens.wasted == {"failed": 3, "stale": 6}, "as many as the gateway says"
        await stage.settle(rollout, lambda: len(stage.script.sealed) == 3)
    assert stage.rollout.tokens.wasted == {"failed": 3, "stale": 6, "cancelled": 12}
    assert stage.script.dropped == ["g1-000001", "g1-000002", "g1-000003"]
    assert stage.rollout.tokens.metrics()["tokens/used_ratio"] == 0


async def test_each_episode_that_failed_is_counted_once(make: Callable[..., Stage]) -> None:
    """Slot 0 fails three times, and with it its group, in which slot 1 had succeeded."""
    fails = {f"g1-000001.0.{number}" for number in (1, 2, 3)}
    stage = make(Script(lambda name: Outcome.AGENT_ERROR if name in fails else Outcome.COMPLETED))
    async with stage.running() as rollout:
        await stage.settle(
            rollout, lambda: "g1-000001" in stage.script.dropped and len(stage.script.sealed) > 1
        )
        assert dict(stage.rollout.tokens.episodes) == {"failed": 4}
    assert stage.rollout.tokens.metrics()["selection/failed_length"] == 3
    assert sorted(stage.script.kept) == [(one, "failed") for one in sorted({*fails, "g1-000001.1.1"})]


async def test_only_quarantined_tasks_left_is_an_error(make: Callable[..., Stage]) -> None:
    stage = make(Script())
    stage.core.failures.quarantined = {f"t{n}" for n in range(module.MAX_QUARANTINED_IN_A_ROW + 1)}
    with pytest.raises(NoUsableEpisodesError, match="every task is quarantined"):
        await stage.until(lambda: False)


async def test_where_every_group_is_filtered_it_says_so(make: Callable[..., Stage]) -> None:
    stage = make(Script())
    stage.core.streaks.filtered = 255
    async with stage.running() as rollout:
        await stage.settle(rollout, lambda: len(stage.script.sealed) == 2)
        stage.core.lease("g1-000001", 0)
        stage.core.filter_group("g1-000001")
        stage.rollout.wake()
        with pytest.raises(
            NoUsableEpisodesError,
            match=r"256 groups were filtered since .* all equal .*truncated and masked",
        ):
            await stage.settle(rollout, lambda: False)
