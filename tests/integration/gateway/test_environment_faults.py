"""States that cannot be made or are lost, tools without bounds, and the release of every state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.environments import TASK, LocalEnvironments, Safe
from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.test_environments import call, finished, id_of, opened, session_of
from tests.journal_copy import copy_journal
from tests.remote_workers import WORKER_KEY, Attempts
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.base import Session
from tidegate.agents.chat import ChatAgent
from tidegate.errors import GatewayError
from tidegate.gateway import gateway as gateway_module
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.environments import calls, states
from tidegate.gateway.environments.base import EpisodeLostError
from tidegate.gateway.sessions import session as session_module
from tidegate.types import Outcome

ASK: list[Any] = [*TASK.messages]


@pytest.fixture
def service() -> LocalEnvironments:
    return LocalEnvironments(Safe())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "tiny", "qwen3")


@pytest.fixture
async def stage(
    model: Path, tmp_path: Path, service: LocalEnvironments, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(gateway_module, "SWEEP_S", 0.05)
    options: dict[str, Any] = {"worker_key": WORKER_KEY, "grace_s": 0.1}
    async with staged(model, environments=service, journal=tmp_path / "journal", **options) as made:
        yield made


async def ask(session: Session) -> None:
    await session.openai().chat.completions.create(model="m", messages=ASK)


def torn_down(service: LocalEnvironments, session: Session) -> Callable[[], bool]:
    return lambda: ("teardown", id_of(session)) in service.events and not service.states


def expire_soon(stage: Stage, session: Session) -> None:
    """Moves a session's deadline, so that no slow machine passes it earlier."""
    stage.gateway.session(id_of(session)).deadline = asyncio.get_running_loop().time() + 0.2


# -- states that are not there -------------------------------------------------------------------


@pytest.mark.parametrize("report", [{}, {"outcome": "agent_error"}, {"outcome": "timeout"}])
@pytest.mark.parametrize("cause", ["fails", "raises", "hangs"])
async def test_a_setup_without_a_state_is_an_infra_error(
    stage: Stage,
    service: LocalEnvironments,
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
    report: dict[str, Any],
) -> None:
    monkeypatch.setattr(states, "SETUP_S", 0.2)
    if cause == "hangs":
        service.hold = asyncio.Event()
    else:
        service.setup_error = (
            EpisodeLostError("no disk") if cause == "fails" else ZeroDivisionError("no disk")
        )
    session = await opened(stage)
    why = "made no state within 0.2 s" if cause == "hangs" else "no disk"
    started = time.monotonic()
    for use in (ask(session), session.call(call("enter", digit=4)), session.respond(ASK[0])):
        with pytest.raises(openai.APIStatusError, match=why) as refused:
            await use
        assert refused.value.status_code == 424
    assert time.monotonic() - started < 15, "the SDK does not repeat such a call"
    trajectory = await finished(stage, session, **report)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRA_ERROR, None)
    assert why in str(trajectory.error)
    assert not stage.engine.requests
    await eventually(torn_down(service, session))


async def test_a_finish_before_the_setup_waits_for_it(stage: Stage, service: LocalEnvironments) -> None:
    service.hold = asyncio.Event()
    session = await opened(stage)
    finishing = asyncio.create_task(finished(stage, session, outcome="agent_error", error="it crashed"))
    await eventually(lambda: stage.gateway.session(id_of(session)).closed)
    service.setup_error = EpisodeLostError("no disk")
    service.hold.set()
    assert (await finishing).outcome is Outcome.INFRA_ERROR


async def test_a_cancelled_episode_stays_cancelled(stage: Stage, service: LocalEnvironments) -> None:
    service.setup_error = EpisodeLostError("no disk")
    trajectory = await finished(stage, await opened(stage), outcome="cancelled")
    assert trajectory.outcome is Outcome.CANCELLED


@pytest.mark.parametrize("use", ["call", "respond"])
async def test_a_state_lost_in_an_episode_is_an_infra_error(
    stage: Stage, service: LocalEnvironments, use: str
) -> None:
    session = await opened(stage)
    await session.call(call("enter", digit=4))
    await ask(session)
    service.lose()
    with pytest.raises(openai.APIStatusError, match="state is lost: its process ended"):
        await (session.call(call("enter", "2", digit=7)) if use == "call" else session.respond(ASK[0]))
    with pytest.raises(openai.APIStatusError, match="state is lost"):
        await ask(session)
    trajectory = await finished(stage, session)
    assert trajectory.outcome is Outcome.INFRA_ERROR
    assert [one.arguments for one in trajectory.tool_calls] == [{"digit": 4}]


async def test_an_agent_that_raises_about_a_lost_state_is_not_at_fault(
    stage: Stage, service: LocalEnvironments
) -> None:
    service.setup_error = EpisodeLostError("no disk")
    session = await opened(stage)
    with pytest.raises(openai.APIStatusError):
        await ChatAgent().run(TASK.view(), session)
    assert (await finished(stage, session, outcome="agent_error")).outcome is Outcome.INFRA_ERROR


# -- bounds of tools -----------------------------------------------------------------------------


async def test_a_large_result_is_cut(stage: Stage) -> None:
    session = await opened(stage)
    text = (await session.call(call("read", length=10**6)))["content"]
    shown, _, note = text.partition("\n")
    assert shown == "é" * (calls.MAX_RESULT // 2)
    assert note == "[the result has 2000000 bytes; it was cut after 65536]"
    assert (await finished(stage, session)).tool_calls[0].result == text


async def test_large_arguments_are_refused(stage: Stage, service: LocalEnvironments) -> None:
    session = await opened(stage)
    with pytest.raises(openai.APIStatusError, match="more than the limit") as refused:
        await session.call(call("enter", digit="4" * calls.MAX_ARGUMENTS))
    assert refused.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="more than the limit"):
        await session.respond({"role": "assistant", "content": "4" * calls.MAX_ARGUMENTS})
    assert service.calls == 0


@pytest.mark.parametrize("budget", ["calls", "bytes"])
async def test_a_budget_of_tool_calls_truncates_the_episode(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    if budget == "bytes":
        monkeypatch.setattr(session_module, "MAX_RECORDED", 150)
    session = await opened(stage, limits={"tool_calls": 2} if budget == "calls" else {})
    await ask(session)
    for number in (1, 2):
        await session.call(call("read", str(number)))
    with pytest.raises(openai.PermissionDeniedError, match="budget is exhausted"):
        await session.call(call("read", "3"))
    trajectory = await finished(stage, session, outcome="agent_error")
    assert (trajectory.outcome, len(trajectory.tool_calls)) == (Outcome.TRUNCATED, 2)


async def test_a_call_that_does_not_return_ends_with_the_session(
    stage: Stage, service: LocalEnvironments
) -> None:
    session = await opened(stage)
    await session.call(call("read"))
    service.hold = asyncio.Event()
    calling = asyncio.create_task(session.call(call("enter", "2", digit=4)))
    await eventually(lambda: service.calls == 2)
    trajectory = await finished(stage, session)
    with pytest.raises(openai.APIStatusError, match="this session is over") as refused:
        await calling
    assert refused.value.status_code == 410
    assert [one.name for one in trajectory.tool_calls] == ["read"]
    for use in (session.call(call("read", "3")), session.respond(ASK[0])):
        with pytest.raises(openai.APIStatusError, match="it was finished") as refused:
            await use
        assert refused.value.status_code == 410


async def test_a_call_ends_at_the_deadline(stage: Stage, service: LocalEnvironments) -> None:
    session = await opened(stage)
    await session.call(call("read"))
    service.hold = asyncio.Event()
    calling = asyncio.create_task(session.call(call("enter", "2", digit=4)))
    await eventually(lambda: service.calls == 2)
    expire_soon(stage, session)
    with pytest.raises(openai.APIStatusError, match="its deadline passed") as refused:
        await calling
    assert refused.value.status_code == 410
    await eventually(torn_down(service, session))


async def test_a_call_whose_client_is_gone_is_recorded(stage: Stage, service: LocalEnvironments) -> None:
    session = await opened(stage)
    await session.call(call("read"))
    service.hold = asyncio.Event()
    headers = {"Authorization": f"Bearer {session.api_key}", "Idempotency-Key": "2"}
    async with aiohttp.ClientSession(headers=headers) as http:
        posting = asyncio.create_task(http.post(f"{session.url}/tools/enter", json={"digit": 4}))
        await eventually(lambda: service.calls == 2)
        posting.cancel()
        await asyncio.wait((posting,))
    service.hold.set()
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{session.url}/tools/enter", json={"digit": 4}) as again,
    ):
        assert "closed" in await again.text()
    assert service.calls == 2
    assert [one.name for one in (await finished(stage, session)).tool_calls] == ["read", "enter"]


async def test_a_call_that_cannot_be_recorded_is_repeated(
    stage: Stage, service: LocalEnvironments, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(stage)
    await session.call(call("read"))
    write, failures = stage.gateway.journal.tool_called, [GatewayError("the disk is full", status=503)]

    async def failing(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        await write(*arguments)

    monkeypatch.setattr(stage.gateway.journal, "tool_called", failing)
    assert (await session.call(call("enter", "2", digit=4)))["content"] == "closed"
    assert not failures
    assert service.calls == 2, "the tool ran once"
    assert len((await finished(stage, session)).tool_calls) == 2


# -- releases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["deleted", "dropped", "erased", "expired"])
async def test_every_end_releases_the_state(stage: Stage, service: LocalEnvironments, end: str) -> None:
    session = await opened(stage, group_id="g")
    await session.call(call("read"))
    assert service.states
    if end == "deleted":
        await stage.client.delete_session(id_of(session))
    elif end == "dropped":
        [trajectory] = await stage.client.drop_group("g")
        assert len(trajectory.tool_calls) == 1
    elif end == "erased":
        await stage.gateway.erase("g")
    else:
        expire_soon(stage, session)
    await eventually(torn_down(service, session))
    await eventually(lambda: len(stage.gateway.sessions) == 0)


async def test_a_closing_gateway_without_journal_releases_all_states(
    model: Path, service: LocalEnvironments
) -> None:
    async with staged(model, environments=service) as stage:
        for _ in range(3):
            await (await opened(stage)).call(call("read"))
        assert len(service.states) == 3
    assert not service.states
    assert service.closed


# -- workers -------------------------------------------------------------------------------------


async def test_an_attempt_gets_its_state_when_a_worker_takes_it(
    stage: Stage, service: LocalEnvironments
) -> None:
    access = await stage.client.open_session(task=TASK, deadline_s=20.0, offer_heartbeat_s=60.0)
    async with Attempts(stage.url) as worker:
        assert service.events == []
        [attempt] = await worker.next()
        assert attempt["tools_url"] == f"{stage.url}/s/{access.session_id}/tools"
        assert attempt["mcp_url"] == f"{stage.url}/s/{access.session_id}/mcp"
        session = session_of(SessionAccess(attempt["attempt"], attempt["base_url"], attempt["api_key"]))
        await session.call(call("enter", digit=4))
        await ask(session)
        await worker.finish(attempt, reward=1.0)
    await eventually(torn_down(service, session))


@pytest.mark.parametrize("how", ["silent", "left"])
async def test_the_state_of_a_lost_worker_is_released(
    stage: Stage, service: LocalEnvironments, how: str
) -> None:
    access = await stage.client.open_session(task=TASK, deadline_s=20.0, offer_heartbeat_s=0.3)
    async with Attempts(stage.url) as worker:
        [attempt] = await worker.next()
        session = session_of(SessionAccess(attempt["attempt"], attempt["base_url"], attempt["api_key"]))
        assert (await session.call(call("enter", digit=4)))["content"] == "closed"
        if how == "left":
            await worker.leave()
        await eventually(torn_down(service, session))
    lost = (await stage.client.result(access.session_id)).outcome
    assert lost is (Outcome.INFRA_ERROR if how == "silent" else Outcome.CANCELLED)


async def test_an_attempt_that_is_given_back_gets_a_new_state(
    stage: Stage, service: LocalEnvironments
) -> None:
    access = await stage.client.open_session(task=TASK, deadline_s=20.0, offer_heartbeat_s=60.0)
    taken = await stage.gateway.attempts.take("gone", 1, 1.0)
    await eventually(lambda: service.states)
    await stage.gateway.attempts.give_back(taken)
    async with Attempts(stage.url) as worker:
        [attempt] = await worker.next()
        session = session_of(SessionAccess(attempt["attempt"], attempt["base_url"], attempt["api_key"]))
        assert (await session.call(call("enter", digit=4)))["content"] == "closed"
    assert [event for event, _ in service.events] == ["setup", "teardown", "setup"]
    await stage.client.delete_session(access.session_id)


# -- restarts ------------------------------------------------------------------------------------


def killed(tmp_path: Path) -> Path:
    return copy_journal(tmp_path / "journal", tmp_path / "after")


async def reached(stage: Stage, session: Session) -> Session:
    """The session at another gateway."""
    access = SessionAccess(id_of(session), f"{stage.url}/s/{id_of(session)}/v1", session.api_key)
    return session_of(access)


async def test_a_restarted_gateway_continues_with_the_state(
    stage: Stage, model: Path, tmp_path: Path, service: LocalEnvironments
) -> None:
    session = await opened(stage)
    await session.call(call("enter", "1", digit=4))
    async with staged(model, environments=service, journal=killed(tmp_path)) as later:
        session = await reached(later, session)
        assert (await session.call(call("enter", "2", digit=7)))["content"] == "open"
        assert [event for event, _ in service.events] == ["setup", "check"]
        await ask(session)
        calls = (await finished(later, session)).tool_calls
        assert [one.result for one in calls] == ["closed", "open"]
        journal = copy_journal(tmp_path / "after", tmp_path / "last")
    async with staged(model, environments=service, journal=journal) as last:
        assert (await last.client.trajectory(id_of(session))).tool_calls == calls


@pytest.mark.parametrize("used", [True, False])
async def test_a_state_that_is_lost_in_a_restart_is_not_made_anew(
    stage: Stage, model: Path, tmp_path: Path, service: LocalEnvironments, used: bool
) -> None:
    session = await opened(stage)
    if used:
        await session.respond(ASK[0])
    await eventually(lambda: stage.gateway.session(id_of(session)).set_up)
    await ask(session)
    service.lose()
    async with staged(model, environments=service, journal=killed(tmp_path)) as later:
        session = await reached(later, session)
        with pytest.raises(openai.APIStatusError, match="state is lost"):
            await session.call(call("enter", digit=4))
        trajectory = await finished(later, session)
        assert trajectory.outcome is Outcome.INFRA_ERROR
        assert not service.states


async def test_a_session_that_was_being_finished_is_scored_with_its_state(
    stage: Stage, model: Path, tmp_path: Path, service: LocalEnvironments, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(stage)
    await ask(session)
    scoring, reward = asyncio.Event(), stage.gateway.scorer.reward

    async def hanging(*arguments: Any, **named: Any) -> None:
        scoring.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(stage.gateway.scorer, "reward", hanging)
    finishing = asyncio.create_task(finished(stage, session))
    await scoring.wait()
    service.lose()
    async with staged(model, environments=service, journal=killed(tmp_path)) as later:
        summary = await later.client.finish(id_of(session))
        assert summary.outcome is Outcome.INFRA_ERROR
        assert ("check", id_of(session)) in service.events
    finishing.cancel()
    monkeypatch.setattr(stage.gateway.scorer, "reward", reward)
