"""The teacher: which tokens it is asked for, where its values go, and what follows from its faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.serving import served
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tests.waiting import eventually
from tidegate.errors import TrainingError
from tidegate.settings.teacher import TeacherSettings
from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.records.trajectories import decode_trajectory, encode_trajectory
from tidegate.trainer.teacher import teacher as teacher_module
from tidegate.trainer.teacher.client import ScoreClient
from tidegate.trainer.teacher.teacher import Hint, Teacher
from tidegate.types import Group, Trajectory

LIMIT_S = 30.0
Reply = Callable[[dict[str, Any]], Any]


def value_of(ids: list[int], at: int) -> float:
    """The teacher's logprob of a token: it depends on the token and on all earlier ones."""
    return -float(sum(ids[:at]) + 100 * ids[at])


def likeliest_of(ids: list[int], at: int, number: int) -> list[list[Any]]:
    """The teacher's likeliest ids in place of a token."""
    return [[-0.5 * rank - sum(ids[:at]), rank + ids[at], None] for rank in range(number)]


@dataclass
class FakeTeacher:
    """Answers as the engine does; each request takes the next fault, while there are any."""

    faults: list[Any] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    open: int = 0
    most: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)
    """What a request that hangs waits for."""

    def __post_init__(self) -> None:
        self.hold.set()

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.hold.wait()
            fault = self.faults.pop(0) if self.faults else None
            if isinstance(fault, int):
                return JSONResponse({"error": {"message": f"planted {fault}"}}, fault)
            if fault == "hang":
                await self.end.wait()
            ids, start = body["input_ids"], body["logprob_start_len"]
            entries = [
                [value_of(ids, at) if at > start else None, ids[at], None] for at in range(start, len(ids))
            ]
            top = body.get("top_logprobs_num", 0)
            likeliest = [entry[1:2] and likeliest_of(ids, at, top) for at, entry in enumerate(entries, start)]
            meta = {"input_token_logprobs": entries, "input_top_logprobs": [None, *likeliest[1:]]}
            if callable(fault):
                meta["input_token_logprobs"] = fault(entries)
            if isinstance(fault, Mapping):
                meta |= fault
            return JSONResponse({"meta_info": meta})
        finally:
            self.open -= 1


@dataclass
class Stage:
    fake: FakeTeacher
    teacher: Teacher
    notes: list[str]


@contextlib.asynccontextmanager
async def stage(limit_s: float = 60.0, hint: Hint | None = None, **settings: Any) -> AsyncIterator[Stage]:
    fake, notes, supervisor = FakeTeacher(), [], TaskSupervisor()
    app = Starlette(routes=[Route("/generate", fake.generate, methods=["POST"])])
    async with served(app) as url:
        made = TeacherSettings(**{"url": url, "deadline_s": 10.0, **settings})
        teacher = Teacher(
            settings=made,
            urls={"": url},
            client=ScoreClient(made.deadline_s),
            watch=supervisor.watch,
            note=notes.append,
            limit_s=limit_s,
            hint=hint,
        )
        try:
            yield Stage(fake, teacher, notes)
        finally:
            fake.hold.set()
            fake.end.set()
            await teacher.close()
            await supervisor.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_module, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(teacher_module, "LONGEST_DELAY_S", 0.01)


def episode(name: str = "s", seed: int = 0) -> Trajectory:
    """Two turns, a branch of the first, and a turn that was not delivered."""
    rng = np.random.default_rng(seed)

    def ids(number: int) -> list[int]:
        return [int(one) for one in rng.integers(1, 40, number)]

    turns = [
        make_turn(0, None, ids(4), ids(3)),
        make_turn(1, 0, ids(2), ids(5)),
        make_turn(2, 0, ids(3), ids(2)),
        make_turn(3, 1, ids(1), ids(2)),
    ]
    turns[3].delivered = False
    found = make_trajectory(turns)
    found.session_id = name
    return found


def group(name: str = "g", size: int = 2) -> Group:
    return Group(name, "t", [episode(f"{name}-{slot}", slot) for slot in range(size)])


async def score(stage: Stage, group: Group) -> None:
    stage.teacher.begin(group)
    async with asyncio.timeout(LIMIT_S):
        await stage.teacher.finish([group.id])


def assert_scored(group: Group, before: Callable[[Trajectory], list[int]] = lambda _: []) -> None:
    """Every trained token has the teacher's value for it, after exactly its recorded prefix."""
    for trajectory in group.trajectories:
        hint = before(trajectory)
        for turn in trajectory.trainable_turns():
            prompt = hint + [int(one) for one in trajectory.prompt_ids(turn)]
            ids = prompt + [int(one) for one in turn.output_ids]
            assert turn.teacher_logprobs is not None
            assert turn.teacher_logprobs.tolist() == [
                value_of(ids, at) for at in range(len(prompt), len(ids))
            ]
        for row in rows_of(trajectory, 0.0):
            assert row.teacher is not None
            assert (row.teacher[row.mask] < 0).all()
            assert not row.teacher[~row.mask].any()


async def test_every_trained_token_has_the_value_of_exactly_its_sequence() -> None:
    async with stage() as on:
        scored = group()
        await score(on, scored)
        assert_scored(scored)
        assert len(on.fake.asked) == 4, "two sequences of each episode"
        assert all(turn.teacher_logprobs is None for one in scored.trajectories for turn in one.turns[3:])
        assert on.teacher.scored_tokens == 20
        assert on.teacher.metrics()["teacher/failures"] == 0


async def test_what_was_scored_before_a_resume_is_not_asked_for_again() -> None:
    async with stage() as on:
        scored = group()
        await score(on, scored)
        before = len(on.fake.asked)
        await score(on, scored)
        assert len(on.fake.asked) == before


async def test_the_likeliest_tokens_are_recorded_for_exactly_their_token() -> None:
    async with stage(form="distribution", top_k=3) as on:
        scored = group()
        for turn in scored.trajectories[0].turns[:1]:
            turn.teacher_logprobs = np.zeros(
                len(turn.output_ids), np.float32
            )  # of another form, before a resume
        await score(on, scored)
    assert_scored(scored)
    for trajectory in scored.trajectories:
        for turn in trajectory.trainable_turns():
            prompt = [int(one) for one in trajectory.prompt_ids(turn)]
            ids = prompt + [int(one) for one in turn.output_ids]
            expected = [pair for at in range(len(prompt), len(ids)) for pair in likeliest_of(ids, at, 3)]
            assert turn.teacher_top_ids is not None
            assert turn.teacher_top_logprobs is not None
            assert turn.teacher_top_ids.tolist() == [pair[1] for pair in expected]
            assert turn.teacher_top_logprobs.tolist() == [pair[0] for pair in expected]
        for row in rows_of(decode_trajectory(orjson.loads(orjson.dumps(
            encode_trajectory(trajectory), option=orjson.OPT_SERIALIZE_NUMPY
        ))), 0.0):  # fmt: skip
            assert row.teacher_ids is not None
            assert (row.teacher_ids[row.mask, 0] == row.ids[row.mask]).all()
            assert (row.teacher_ids[row.mask, 2] == row.ids[row.mask] + 2).all()


@pytest.mark.parametrize(
    ("top", "words"),
    [
        (None, "returned no likeliest tokens .* must support top_logprobs_num"),
        ([None], "must support top_logprobs_num"),
        ([None, *[[[-1.0, 3, None]]] * 99], "must support top_logprobs_num"),
    ],
)
async def test_a_teacher_that_reports_no_likeliest_tokens_ends_the_run(top: Any, words: str) -> None:
    async with stage(form="distribution", top_k=3) as on:
        on.fake.faults = [{"input_top_logprobs": top}] * 9
        with pytest.raises(TrainingError, match=words):
            await score(on, group())


@pytest.mark.parametrize("pair", [["x", 3, None], [None, 3, None], [-1.0], ["-inf", 3, None]])
async def test_a_likeliest_token_without_a_value_is_asked_for_again(pair: list[Any]) -> None:
    async with stage(form="distribution", top_k=1) as on:
        scored = group(size=1)
        turns = scored.trajectories[0].turns
        del turns[1:]  # one request
        on.fake.faults = [{"input_top_logprobs": [None, *[[pair]] * len(turns[0].output_ids)]}]
        await score(on, scored)
        assert on.teacher.failures == 1
        assert turns[0].teacher_top_k == 1


@pytest.mark.parametrize(
    "faults",
    [
        [500, 503, 500],
        ["hang", "hang"],
        [lambda entries: None],
        [lambda entries: entries[:-1]],
        [lambda entries: [*entries[:-1], [None, entries[-1][1], None]]],
        [lambda entries: [*entries[:-1], ["-inf", entries[-1][1], None]]],
    ],
    ids=["status", "hang", "none", "few", "null", "infinite"],
)
async def test_a_fault_is_reported_once_and_the_request_repeated(faults: list[Any]) -> None:
    async with stage(deadline_s=2.0) as on:
        on.fake.faults = [(lambda entries: [[0.0, 1, None]]) if fault is None else fault for fault in faults]
        scored = group()
        await score(on, scored)
        assert_scored(scored)
        assert on.teacher.failures == len(faults)
        assert not on.teacher.failing
    assert [("fails" in note, "is back" in note) for note in on.notes] == [(True, False), (False, True)]


async def test_a_teacher_that_refuses_ends_the_run() -> None:
    async with stage() as on:
        on.fake.faults = [400]
        with pytest.raises(TrainingError, match=r"refused to score sampled tokens.*planted 400"):
            await score(on, group())


async def test_a_value_of_another_token_ends_the_run() -> None:
    async with stage() as on:
        on.fake.faults = [lambda entries: [*entries[:-1], [-1.0, entries[-1][1] + 1, None]]]
        with pytest.raises(TrainingError, match="a logprob of token"):
            await score(on, group())


async def test_a_teacher_that_fails_for_too_long_ends_the_run_and_no_token_has_a_value() -> None:
    async with stage(limit_s=0.3) as on:
        on.fake.faults = [500] * 100_000
        failed = group(size=1)
        with pytest.raises(TrainingError, match=r"longer than trainer.outage_s = 0.3.*planted 500.*--resume"):
            await score(on, failed)
        assert all(turn.teacher_logprobs is None for one in failed.trajectories for turn in one.turns)
        assert all(row.teacher is None for one in failed.trajectories for row in rows_of(one, 0.0))


async def test_an_environment_without_a_teacher_is_named() -> None:
    async with stage() as on:
        on.teacher.urls = {"other": "http://127.0.0.1:1"}
        with pytest.raises(TrainingError, match="the environment 'test' has no teacher"):
            await score(on, group())


async def test_each_environment_has_its_teacher() -> None:
    async with stage() as on, stage() as other:
        on.teacher.urls = {**on.teacher.urls, "other": other.teacher.urls[""]}
        mixed = group()
        mixed.trajectories[1].env = "other"
        await score(on, mixed)
        assert_scored(mixed)
        assert [len(one.fake.asked) for one in (on, other)] == [2, 2]


async def test_requests_at_a_time_are_limited() -> None:
    async with stage(max_requests=3) as on:
        on.fake.hold.clear()
        groups = [group(f"g{number}") for number in range(4)]
        for one in groups:
            on.teacher.begin(one)
        await eventually(lambda: on.fake.open == 3)
        on.fake.hold.set()
        async with asyncio.timeout(LIMIT_S):
            await on.teacher.finish([one.id for one in groups])
        assert on.fake.most == 3
        for one in groups:
            assert_scored(one)


async def test_a_group_that_is_dropped_is_not_scored() -> None:
    async with stage() as on:
        on.fake.hold.clear()
        dropped, kept = group("dropped"), group("kept")
        on.teacher.begin(dropped)
        await eventually(lambda: on.fake.open == 4)
        on.teacher.drop("dropped")
        on.teacher.drop("unknown")
        await eventually(lambda: len(on.teacher._tasks) == 0)
        on.fake.hold.set()
        await score(on, kept)
        assert_scored(kept)
        assert all(turn.teacher_logprobs is None for one in dropped.trajectories for turn in one.turns)


class Words:
    """A tokenizer whose ids are the characters' codes."""

    bos_token_id = None

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if not messages[0]["content"]:
            raise ValueError("no content")
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(one) for one in text]


async def test_with_a_hint_the_teacher_reads_it_and_scores_the_same_tokens() -> None:
    async with stage(hint=Hint("It is {answer}.", Words())) as on:
        scored = group()
        for number, trajectory in enumerate(scored.trajectories):
            trajectory.answer = f"x{number}"
        await score(on, scored)
        assert_scored(scored, lambda one: [ord(letter) for letter in f"It is {one.answer}."])


def test_a_hint_does_not_repeat_the_token_that_begins_a_text() -> None:
    words = Words()
    words.bos_token_id = ord("^")
    hint = Hint("^hint", words)
    assert hint.prepend([ord("^"), 1, 2], None) == [*map(ord, "^hint"), 1, 2]
    assert Hint("hint", words).prepend([ord("^"), 1], None) == [*map(ord, "hint^"), 1]
