"""Public reports of slow inference that was taken for a failure, tried on the gateway."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.fakes import Fault, Stage, eventually, staged
from tests.integration.gateway.test_faults import ask, opened
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.engines.engine import PoolOptions
from tidegate.types import Outcome


@pytest.fixture
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    """An engine that is probed often; the parameter is the time limit of a probe, in seconds."""
    pool = PoolOptions(probe_every_s=0.05, probe_timeout_s=getattr(request, "param", 5.0))
    async with staged(make_model_dir(tmp_path / "tiny"), pool=pool) as made:
        yield made


SHORT_PROBES = pytest.mark.parametrize("stage", [0.1], indirect=True)


async def failed_probes(stage: Stage, number: int) -> None:
    """Waits until so many more probes have had no answer."""
    before = stage.engine.unanswered
    await eventually(lambda: stage.engine.unanswered >= before + number)


@SHORT_PROBES
async def test_an_engine_that_streams_is_healthy_though_its_probes_have_no_answer(stage: Stage) -> None:
    """ray-project/ray#54070: an engine that 1,280 requests kept busy was restarted as unhealthy."""
    _, llm = await opened(stage)
    stage.say("x" * 40)
    stage.engine.stream_delay = asyncio.Event()
    call = asyncio.create_task(ask(llm, stream=True))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    stage.engine.info_hangs = True
    for _ in range(8):  # a token while each probe waits
        await failed_probes(stage, 1)
        stage.engine.stream_delay.set()
        stage.engine.stream_delay = asyncio.Event()
    assert stage.gateway.pool.engines()[0].healthy
    stage.engine.stream_delay.set()
    assert await asyncio.wait_for(call, 10)
    assert len(stage.engine.requests) == 1


@SHORT_PROBES
async def test_the_only_engine_keeps_its_calls_while_it_does_not_respond(stage: Stage) -> None:
    """rllm-org/rllm#926: the only worker compiled for 108 s, was marked dead, and every session failed."""
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("hold"))
    call = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    stage.engine.info_hangs = True
    await failed_probes(stage, 4)
    stage.engine.release()
    assert await asyncio.wait_for(call, 10)
    assert len(stage.engine.requests) == 1, "the call was not repeated"
    assert (await stage.client.finish(access.session_id, reward=1)).outcome is Outcome.COMPLETED


async def test_a_deadline_in_a_long_prefill_is_no_failure_of_the_engine(stage: Stage) -> None:
    """sgl-project/sglang#22511: an engine in a long prefill was reported as unhealthy."""
    ways = [(told, stream) for told in ("agent_error", "timeout", None) for stream in (False, True)]
    # The deadline begins when a session opens: on a busy machine the six calls need a while to begin.
    sessions = [await opened(stage, deadline_s=10.0) for _ in ways]
    stage.engine.faults.extend([Fault("hang")] * len(ways))
    calls = [ask(llm, stream) for (_, llm), (_, stream) in zip(sessions, ways, strict=True)]
    for raised in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(raised, openai.APIStatusError)
        assert re.search(r"tokens/s for \d calls, and 0 more calls wait", str(raised)), raised
    for (access, _), (told, _) in zip(sessions, ways, strict=True):
        found = await stage.client.finish(access.session_id, outcome=told, error=told and "it raised")
        assert found.outcome is Outcome.TIMEOUT, (told, found.error)
        assert "agent.deadline_s = 10" in str(found.error)
        assert found.engine_wait_s > 0


async def test_a_session_that_is_closed_at_its_deadline_blames_no_agent_for_its_call(stage: Stage) -> None:
    """The sweep of expired sessions may be ahead of the timeout of a call, which it then cancels."""
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("hang"))
    call = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    session = stage.gateway.session(access.session_id)
    session.deadline = asyncio.get_running_loop().time()
    await stage.gateway.finisher.expire(session.deadline)
    with pytest.raises(openai.APIStatusError, match="tokens/s for 1 calls, and 0 more calls wait"):
        await call
    found = await stage.client.finish(access.session_id, outcome="agent_error", error="it raised")
    assert (found.outcome, found.engine_wait_s > 0) == (Outcome.TIMEOUT, True)


async def test_a_call_that_waits_for_a_busy_engine_is_no_failure_of_the_engine(tmp_path: Path) -> None:
    """sgl-project/sglang#12355: at a high rate of requests no worker was available, and calls failed."""
    pool = PoolOptions(probe_every_s=0.05, engine_calls=1, waiting_calls=1)
    async with staged(make_model_dir(tmp_path / "tiny"), pool=pool) as stage:
        # A call counts as slow if it waits for half of its session's deadline, which begins when it opens.
        refused_access, refused_llm = await opened(stage, deadline_s=60.0)
        sessions = [await opened(stage, deadline_s=8.0) for _ in range(2)]
        stage.engine.faults.extend([Fault("hang")] * 2)
        calls = [asyncio.create_task(ask(llm)) for _, llm in sessions]
        await eventually(lambda: stage.gateway.pool.waiting == 1)
        with pytest.raises(openai.InternalServerError, match="queue is full"):
            await ask(refused_llm.with_options(max_retries=0))
        refused = await stage.client.finish(refused_access.session_id, outcome="agent_error", error="503")
        assert (refused.outcome, refused.engine_wait_s > 0) == (Outcome.TIMEOUT, True)
        await asyncio.gather(*calls, return_exceptions=True)
        for access, _ in sessions:
            found = await stage.client.finish(access.session_id, outcome="agent_error", error="it raised")
            assert (found.outcome, found.engine_wait_s > 0) == (Outcome.TIMEOUT, True)


async def test_a_clients_own_timeout_blames_neither_engine_nor_task(stage: Stage) -> None:
    """BerriAI/litellm#41223: timeouts that callers chose took a working deployment out of service."""
    access, llm = await opened(stage)
    stage.engine.faults.extend([Fault("hang")] * 4)
    with pytest.raises(openai.APITimeoutError) as raised:
        await ask(llm.with_options(timeout=0.2, max_retries=3))
    assert stage.gateway.pool.engines()[0].healthy
    error = f"{type(raised.value).__name__}: {raised.value}"
    found = await stage.client.finish(access.session_id, outcome="agent_error", error=error)
    assert (found.outcome, found.engine_wait_s > 0) == (Outcome.TIMEOUT, True)


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
async def test_a_clock_that_is_set_during_a_call_changes_no_wait(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    now, (access, llm) = time.time, await opened(stage)
    stage.engine.faults.extend([Fault("hang")] * 2)
    left = asyncio.create_task(ask(llm.with_options(timeout=0.2, max_retries=0)))
    running = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 2)
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    session = stage.gateway.session(access.session_id)
    with pytest.raises(openai.APITimeoutError):
        await left
    await eventually(lambda: session.slow is not None)
    assert session.slow is not None
    wait = session.waits(asyncio.get_running_loop().time())
    assert wait is not None
    assert [0 <= one.seconds < 60 for one in (session.slow, wait)] == [True, True]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_agent_that_fails_by_itself_is_to_blame_though_it_left_a_call(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("hang"))
    with pytest.raises(openai.APITimeoutError):
        await ask(llm.with_options(timeout=0.2, max_retries=0))
    found = await stage.client.finish(access.session_id, outcome="agent_error", error="KeyError: 'answer'")
    assert (found.outcome, found.engine_wait_s) == (Outcome.AGENT_ERROR, 0)


async def test_a_deadline_without_a_call_is_the_agents(stage: Stage) -> None:
    access, llm = await opened(stage)
    await ask(llm)
    found = await stage.client.finish(access.session_id, outcome="timeout", error="it hangs")
    assert (found.outcome, found.error, found.engine_wait_s) == (Outcome.TIMEOUT, "it hangs", 0)


async def test_a_deadline_after_replies_that_took_most_of_the_time_is_that_of_slow_engines(
    stage: Stage,
) -> None:
    access, llm = await opened(stage, deadline_s=3.0)
    stage.engine.faults.append(Fault("hold"))
    call = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    session = stage.gateway.sessions.get(access.session_id)
    assert session is not None
    loop = asyncio.get_running_loop()
    await eventually(lambda: loop.time() > session.opened + 2.0)
    stage.engine.release()
    assert await call
    found = await stage.client.finish(access.session_id, outcome="timeout", error="too late")
    assert (found.outcome, found.engine_wait_s > 1.5) == (Outcome.TIMEOUT, True)
    assert "tokens/s; agent.deadline_s = 3" in str(found.error)


async def test_a_deadline_after_the_engine_exited_is_an_infrastructure_error(stage: Stage) -> None:
    access, llm = await opened(stage, deadline_s=3.0)
    stage.engine.faults.append(Fault("hang"))
    call = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    await stage.engine.stop()
    with pytest.raises(openai.APIStatusError, match="no engine answered"):
        await call
    found = await stage.client.finish(access.session_id, outcome="agent_error", error="it raised")
    assert (found.outcome, found.engine_wait_s) == (Outcome.INFRA_ERROR, 0)
