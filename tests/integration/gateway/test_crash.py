"""Recovery of a gateway after a kill at different moments, and a journal that cannot be written.

A kill is simulated by a copy of the journal's files: `kill -9` keeps what was given to the operating system.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.test_journal import ASK, TASK, client_of, killed, model, talk
from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient, SessionAccess
from tidegate.gateway.journal import sqlite
from tidegate.gateway.journal.schema import WHOLE_SESSION, turn_id
from tidegate.gateway.journal.sqlite import FILE, DiskJournal
from tidegate.types import Message, Outcome, Scored, Task, Trajectory

__all__ = ["model"]
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
async def stage(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """A gateway that is always killed before it could note that a reply went out."""
    monkeypatch.setattr(sqlite, "FLUSH_DELAY_S", 3600.0)
    async with staged(model, journal=tmp_path / "journal") as made:
        yield made


async def ask(stage: Stage, access: SessionAccess, headers: dict[str, str], messages: list[Any] = ASK) -> Any:
    async with client_of(stage, access) as llm:
        return await llm.chat.completions.create(model="m", messages=messages, extra_headers=headers)


def delivered(stage: Stage, access: SessionAccess) -> list[bool]:
    return [node.turn.delivered for node in stage.gateway.session(access.session_id).tree.nodes]


async def test_a_retry_is_given_the_turn_that_is_in_doubt(stage: Stage, model: Path, tmp_path: Path) -> None:
    access = await stage.client.open_session(task=TASK)
    first = await ask(stage, access, {})
    async with staged(model, journal=killed(tmp_path)) as later:
        again = await ask(later, access, RETRY)
        assert again.id == first.id
        assert again.choices == first.choices
        assert again.usage == first.usage
        assert delivered(later, access) == [True]
        assert (await ask(later, access, RETRY)).id == first.id  # that one was lost again
        other = await ask(later, access, {})  # no retry: another sample
        assert other.id != first.id
        assert len(stage.engine.requests) + len(later.engine.requests) == 2  # it knows both engines


async def test_a_retry_is_given_the_turn_that_went_out_before_the_kill(model: Path, tmp_path: Path) -> None:
    async with staged(model, journal=tmp_path / "journal") as stage:
        access = await stage.client.open_session(task=TASK)
        first = await ask(stage, access, {})
    async with staged(model, journal=tmp_path / "journal") as later:
        assert delivered(later, access) == [True]
        assert (await ask(later, access, RETRY)).id == first.id
        assert len(stage.engine.requests) + len(later.engine.requests) == 1


async def test_a_retry_gets_the_same_tool_calls(stage: Stage, model: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    access = await stage.client.open_session(task=TASK)
    stage.say('Hm. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')
    asked: dict[str, Any] = {"model": "m", "messages": ASK, "tools": [tool]}
    async with client_of(stage, access) as llm:
        first = await llm.chat.completions.create(**asked)
    assert first.choices[0].message.tool_calls
    async with staged(model, journal=killed(tmp_path)) as later, client_of(later, access) as llm:
        again = await llm.chat.completions.create(**asked, extra_headers=RETRY)
        assert again.choices == first.choices


async def test_an_idempotency_key_is_known_for_good(stage: Stage, model: Path, tmp_path: Path) -> None:
    access = await stage.client.open_session(task=TASK)
    key = {"idempotency-key": "k1"}
    first = await ask(stage, access, key)
    async with staged(model, journal=killed(tmp_path)) as later:
        assert (await ask(later, access, key)).id == first.id
        assert (await ask(later, access, key)).id == first.id
        with pytest.raises(openai.BadRequestError, match="another body"):
            await ask(later, access, key, [{"role": "user", "content": "something else"}])
        assert len(stage.engine.requests) + len(later.engine.requests) == 1


async def test_a_reply_quoted_after_a_crash_was_delivered(stage: Stage, model: Path, tmp_path: Path) -> None:
    access = await stage.client.open_session(task=TASK)
    history = await talk(stage, access, 1)
    async with staged(model, journal=killed(tmp_path)) as later:
        await talk(later, access, 1, [*history, {"role": "user", "content": "more"}])
        assert delivered(later, access) == [True, True]
        again = killed(tmp_path, "again")
    assert again.exists()


async def test_the_newest_turn_was_delivered_if_the_session_ends_with_it(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    access = await stage.client.open_session(task=TASK)
    await talk(stage, access, 2)
    async with staged(model, journal=killed(tmp_path)) as later:
        assert delivered(later, access) == [True, False]
        await later.client.finish(access.session_id, reward=1.0)
        trajectory = await later.client.trajectory(access.session_id)
        assert [turn.delivered for turn in trajectory.turns] == [True, True]
        assert trajectory.messages[-1]["role"] == "assistant"
        assert len(trajectory.messages) == 4


async def test_a_turn_in_doubt_after_which_another_was_sampled_is_not_delivered(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    access = await stage.client.open_session(task=TASK)
    await ask(stage, access, {})
    async with staged(model, journal=killed(tmp_path)) as later:
        await ask(later, access, {})  # no retry: another sample
        await later.client.finish(access.session_id, reward=1.0)
        trajectory = await later.client.trajectory(access.session_id)
        assert [turn.delivered for turn in trajectory.turns] == [False, True]


async def test_an_agent_that_takes_the_restart_for_an_error_is_tried_again(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    hurt = await stage.client.open_session(task=TASK)
    fine = await stage.client.open_session(task=TASK)
    for access in (hurt, fine):
        await talk(stage, access, 1)
    async with staged(model, journal=killed(tmp_path)) as later:
        await ask(later, fine, {})
        for access, outcome in ((hurt, Outcome.INFRA_ERROR), (fine, Outcome.AGENT_ERROR)):
            summary = await later.client.finish(access.session_id, outcome="agent_error", error="raised")
            assert summary.outcome is outcome


async def test_a_session_draws_from_no_seed_twice(stage: Stage, model: Path, tmp_path: Path) -> None:
    access = await stage.client.open_session(task=TASK, seed=7)
    await ask(stage, access, {})
    async with staged(model, journal=killed(tmp_path)) as later:
        for _ in range(2):
            await ask(later, access, {})
        requests = [*stage.engine.requests, *later.engine.requests]
        assert len({one["sampling_params"]["sampling_seed"] for one in requests}) == 3


async def test_journal_rows_of_a_deleted_session_are_given_to_no_other(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    """A late row of a session that was deleted must not be another's, who may get its number."""
    with contextlib.closing(sqlite3.connect(killed(tmp_path) / FILE)) as connection:
        connection.execute("INSERT INTO sent VALUES (?)", [turn_id(1, 0)])
        connection.execute("INSERT INTO rewards VALUES (1, ?, 'late', 1.0)", [WHOLE_SESSION])
        connection.commit()
    async with staged(model, journal=tmp_path / "after") as later:
        access = await later.client.open_session(task=TASK)
        await ask(later, access, {})
        shutil.copytree(tmp_path / "after", tmp_path / "last")
        async with staged(model, journal=tmp_path / "last") as last:
            session = last.gateway.session(access.session_id)
            assert (session.number, session.rewards) == (1, {})
            assert delivered(last, access) == [False], "nobody noted that it went out"


class Slow:
    """A rewarder that waits to be let go."""

    names = ("exact",)

    def __init__(self, *, open_: bool) -> None:
        self.gate = threading.Event()
        self.called = threading.Event()
        if open_:
            self.gate.set()

    def score(
        self, task: Task, trajectory: Trajectory, output: str | None, messages: list[Message]
    ) -> Scored:
        self.called.set()
        self.gate.wait(20)
        return Scored(float(output == "3"), {"exact": float(output == "3")})


async def test_a_session_whose_reward_was_under_way_is_rewarded_again(model: Path, tmp_path: Path) -> None:
    slow = Slow(open_=False)
    async with staged(model, journal=tmp_path / "journal", rewarders={"sums": slow}) as first:
        access = await first.client.open_session(task=TASK)
        await talk(first, access, 1)
        finishing = asyncio.create_task(first.client.finish(access.session_id, output="3"))
        await eventually(slow.called.is_set)
        journal = killed(tmp_path)
        slow.gate.set()
        summary = await finishing
    quick = Slow(open_=True)
    async with staged(model, journal=journal, rewarders={"sums": quick}) as later:
        session = later.gateway.session(access.session_id)
        await eventually(lambda: session.trajectory is not None)  # nobody had to ask
        again = await later.client.finish(access.session_id, output="other")
        assert again == replace(summary, seconds=again.seconds)
        with pytest.raises(openai.PermissionDeniedError):
            await ask(later, access, {})


# -- a journal that cannot be written ----------------------------------------------------------------


def fill(stage: Stage, more_pages: int | None) -> None:
    """Let the database grow by so many pages and no more, as on a full disk; None lifts it."""
    journal = stage.gateway.journal
    assert isinstance(journal, DiskJournal)
    connection = journal._connection
    [(count,)] = connection.execute("PRAGMA page_count")
    limit = 2**31 if more_pages is None else count + more_pages
    connection.execute(f"PRAGMA max_page_count = {limit}").fetchall()


async def test_nothing_is_delivered_that_is_not_written(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK)
    history = await talk(stage, access, 1)
    more = [*history, {"role": "user", "content": "x" * 3_000}]
    fill(stage, 0)
    with pytest.raises(openai.InternalServerError, match="database or disk is full") as raised:
        await ask(stage, access, {}, more)
    assert raised.value.status_code == 503
    assert raised.value.response.headers.get("x-should-retry") != "false"
    assert raised.value.body["type"] == "journal_error"  # type: ignore[index]
    with pytest.raises(GatewayError, match="cannot be written"):
        await stage.client.health()
    assert delivered(stage, access) == [True, False]
    asked = len(stage.engine.requests)
    fill(stage, None)
    reply = await ask(stage, access, RETRY, more)
    assert len(stage.engine.requests) == asked, "what was kept back is what the retry gets"
    assert delivered(stage, access) == [True, True]
    assert reply.choices[0].message.content is not None
    assert (await stage.client.health())["status"] == "ok"


async def test_the_sdk_and_the_client_ride_over_a_full_disk(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK)
    fill(stage, 0)
    more = [{"role": "user", "content": "x" * 3_000}]
    async with client_of(stage, access, max_retries=6) as llm:
        asking = asyncio.create_task(llm.chat.completions.create(model="m", messages=more))
        opening = asyncio.create_task(stage.client.open_session(task=Task("t2", "e", more)))
        await eventually(lambda: stage.gateway.failed is not None)
        fill(stage, None)
        await asking
        other = await opening
    assert len(stage.engine.requests) == 1
    assert delivered(stage, access) == [True]
    assert delivered(stage, other) == []


async def test_the_control_plane_says_what_could_not_be_written(stage: Stage) -> None:
    big = Task("t", "e", [{"role": "user", "content": "x" * 40_000}])
    access = await stage.client.open_session(task=TASK)
    await talk(stage, access, 1)
    fill(stage, 0)
    async with GatewayClient(stage.url, "admin", call_s=0.3) as client:
        with pytest.raises(GatewayError, match="'opened' failed"):
            await client.open_session(task=big)
        with pytest.raises(GatewayError, match="'closing' failed"):
            await client.finish(access.session_id, output="x" * 40_000, reward=1.0, timeout_s=0.3)
    assert len(stage.gateway.sessions) == 1
    fill(stage, None)
    summary = await stage.client.finish(access.session_id, output="other", reward=0.0)
    assert summary.reward == 1.0, "how it ended was decided the first time"


async def test_health_recovers_by_itself(stage: Stage) -> None:
    fill(stage, 0)
    async with GatewayClient(stage.url, "admin", call_s=0.2) as client:
        with pytest.raises(GatewayError, match="disk is full"):
            await client.open_session(task=Task("t", "e", [{"role": "user", "content": "x" * 40_000}]))
    fill(stage, None)
    await eventually(lambda: stage.gateway.failed is None)
