"""Engines that exit, hang, fail or return invalid data: agents get a late reply or one clear error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.fakes import FakeEngine, Fault, Stage, eventually, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.engines.engine import PoolOptions
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.turn import VersionSpan
from tidegate.types import Outcome, Sampling, Task, Trajectory

TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer="3")
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
FAST = PoolOptions(connect_s=5.0, probe_every_s=0.1, probe_timeout_s=10.0)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(make_model_dir(tmp_path / "tiny"), pool=FAST) as made:
        yield made


async def opened(stage: Stage, **options: Any) -> tuple[SessionAccess, AsyncOpenAI]:
    access = await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options})
    return access, await stage.llm(access, max_retries=3)


async def ask(llm: AsyncOpenAI, stream: bool = False, messages: list[Any] = ASK) -> str:
    if not stream:
        reply = await llm.chat.completions.create(model="m", messages=messages)
        return reply.choices[0].message.content or ""
    chunks = await llm.chat.completions.create(model="m", messages=messages, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def ended(stage: Stage, access: SessionAccess) -> Trajectory:
    await stage.client.finish(access.session_id, reward=0)
    return await stage.client.trajectory(access.session_id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "faults",
    [
        [Fault("status", 500)],
        [Fault("status", 503), Fault("status", 429), Fault("status", 502)],
        [Fault("drop")],
        [Fault("drop"), Fault("status", 500), Fault("drop")],
    ],
    ids=["500", "busy", "dropped", "all"],
)
async def test_a_failing_engine_is_a_slow_answer(stage: Stage, faults: list[Fault], stream: bool) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.extend(faults)
    stage.say("3")
    assert await ask(llm, stream) == "3"
    assert len(stage.engine.requests) == len(faults) + 1
    assert len({request["rid"] for request in stage.engine.requests}) == len(faults) + 1
    trajectory = await ended(stage, access)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.COMPLETED, 1)


async def test_a_reply_over_kept_keys_and_values_has_their_version(tmp_path: Path) -> None:
    """They are as old as the version that the gateway knew when it made the call, at most."""
    options = PoolOptions(probe_every_s=0.05, keeps_kv=True)
    async with staged(make_model_dir(tmp_path / "tiny"), pool=options) as stage:
        access, llm = await opened(stage)
        (endpoint,) = stage.gateway.pool.engines()
        stage.engine.faults += [Fault("none"), Fault("version", 2)]
        await ask(llm)
        stage.engine.version = "partial"  # as while weights are sent
        await eventually(lambda: endpoint.weight_version == "partial")
        await ask(llm, messages=[{"role": "user", "content": "2+2?"}])
        assert [request["cache_salt"] for request in stage.engine.requests] == ["0", "0"]
        turns = (await ended(stage, access)).turns
        assert [(turn.kv_version, turn.version_spans[0].version) for turn in turns] == [(None, 0), (0, 2)]
        assert turns[1].oldest_version() == 0
        stage.engine.version = "3"
        await eventually(lambda: endpoint.version == 3)


async def test_calls_name_the_adapter_of_the_version_and_move_on_to_a_new_one(tmp_path: Path) -> None:
    """The version is that of the named adapter, whatever the engine reports, which loads others meanwhile."""
    options = PoolOptions(probe_every_s=3600.0)  # a trainer announces new versions
    async with staged(make_model_dir(tmp_path / "tiny"), pool=options) as stage:
        access, llm = await opened(stage)
        (endpoint,) = stage.gateway.pool.engines()
        stage.engine.version = "v1"
        await stage.client.remove_engine(endpoint.url)
        await stage.client.add_engine(endpoint.url, admitted=True)
        (endpoint,) = stage.gateway.pool.engines()
        assert (endpoint.version, endpoint.adapter, endpoint.weight_version) == (1, "v1", "1")
        stage.engine.faults += [Fault("pause", 2), Fault("version", "v7")]
        stage.say("abcd")
        running = asyncio.create_task(ask(llm, stream=True))
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        stage.engine.version = "v2"
        await stage.client.admit_engine(endpoint.url, True)
        stage.say("ef")
        await running
        assert [request["lora_path"] for request in stage.engine.requests] == ["v1", "v2"]
        assert len(set(stage.engine.aborted)) == 1
        (turn,) = (await ended(stage, access)).turns
        assert [(span.version, span.start) for span in turn.version_spans] == [(1, 0), (2, 2)]
        assert endpoint.adapters_in_use == {}


async def test_a_call_that_names_an_unloaded_adapter_is_sent_again_with_the_new_one(tmp_path: Path) -> None:
    """It was on its way, or the gateway has not read the engine's new version."""
    options = PoolOptions(probe_every_s=3600.0)
    async with staged(make_model_dir(tmp_path / "tiny"), pool=options) as stage:
        _, llm = await opened(stage)
        stage.engine.version = "v1"
        await stage.client.remove_engine(stage.engine.url)
        await stage.client.add_engine(stage.engine.url, admitted=True)
        stage.engine.faults += [Fault("switch", "v2"), Fault("none"), Fault("refuse", "too long")]
        assert await ask(llm)
        with pytest.raises(openai.APIStatusError, match="too long"):
            await ask(llm)
        assert [request["lora_path"] for request in stage.engine.requests] == ["v1", "v2", "v2"]
        assert stage.gateway.pool.engines()[0].version == 2


async def test_a_version_with_leading_zeros_is_a_number(stage: Stage) -> None:
    stage.engine.version = "007"
    (endpoint,) = stage.gateway.pool.engines()
    await eventually(lambda: endpoint.version == 7)
    assert endpoint.adapter is None


async def test_an_engine_that_restarts_at_its_address_is_used_again(stage: Stage) -> None:
    access, llm = await opened(stage)
    assert await ask(llm)
    await stage.engine.stop()
    waiting = asyncio.create_task(ask(llm))
    await eventually(lambda: not stage.gateway.pool.engines()[0].healthy)
    assert not waiting.done()
    stage.say("back")
    await stage.engine.start()
    assert await asyncio.wait_for(waiting, 10) == "back"
    assert [engine["healthy"] for engine in await stage.client.list_engines()] == [True]
    assert (await ended(stage, access)).outcome is Outcome.COMPLETED


async def test_an_engine_that_hangs_is_found_and_its_calls_move_on(tmp_path: Path) -> None:
    """The process accepts connections and says nothing, neither to calls nor to the probe."""
    times = PoolOptions(probe_every_s=0.1, probe_timeout_s=0.3)
    async with staged(make_model_dir(tmp_path / "tiny"), pool=times) as stage:
        _, llm = await opened(stage)
        other = FakeEngine(stage.engine.decode, stop_id=2)
        await other.start()
        stage.stack.push_async_callback(other.stop)
        stage.engine.faults.append(Fault("hang"))
        call = asyncio.create_task(ask(llm))
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        await stage.client.add_engine(other.url)
        stage.engine.info_hangs = True
        assert await asyncio.wait_for(call, 20)
        assert other.requests
        assert not stage.gateway.pool.engines()[0].healthy


async def test_a_slow_engine_is_not_taken_for_one_that_hangs(stage: Stage) -> None:
    _, llm = await opened(stage)
    stage.engine.faults.append(Fault("hold"))
    call = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    await asyncio.sleep(1.0)  # many probes, all answered
    stage.engine.release()
    assert await call
    assert len(stage.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sessions_deadline_ends_the_wait(stage: Stage, stream: bool) -> None:
    access, llm = await opened(stage, deadline_s=3.0)
    stage.engine.faults.append(Fault("hang"))
    with pytest.raises(openai.APIStatusError, match="deadline") as raised:
        await ask(llm, stream)
    assert raised.value.status_code in (403, 424)
    assert raised.value.response.headers["x-should-retry"] == "false"
    await stage.engine.until(lambda: stage.engine.aborted == [stage.engine.requests[0]["rid"]])
    with pytest.raises(openai.PermissionDeniedError, match="deadline passed"):
        await ask(llm)
    summary = await stage.client.finish(access.session_id)
    assert (summary.outcome, summary.reward) == (Outcome.TIMEOUT, None)


async def test_no_engine_at_all_is_an_infrastructure_error(stage: Stage) -> None:
    await stage.client.remove_engine(stage.engine.url)
    access, llm = await opened(stage, deadline_s=0.4)
    with pytest.raises(openai.APIStatusError, match="no engine in rotation"):
        await ask(llm)
    summary = await stage.client.finish(access.session_id, outcome="agent_error", error="it raised")
    assert summary.outcome is Outcome.INFRA_ERROR
    assert summary.error is not None


@pytest.mark.parametrize(
    ("fault", "why", "stream"),
    [
        (Fault("no_logprobs"), "the engine returned no logprobs", False),
        (Fault("no_logprobs"), "the engine returned no logprobs", True),
        (Fault("garbage"), "invalid JSON", False),
        (Fault("status", 400), "refused the request: as asked", False),
        (Fault("status", 400), "refused the request: as asked", True),
    ],
)
async def test_what_an_engine_does_not_give_is_not_made_up(
    stage: Stage, fault: Fault, why: str, stream: bool
) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(fault)
    with pytest.raises(openai.APIError, match=why):
        await ask(llm, stream)
    assert len(stage.engine.requests) == 1
    summary = await stage.client.finish(access.session_id, outcome="agent_error")
    assert (summary.outcome, summary.turns) == (Outcome.INFRA_ERROR, 0)


async def test_an_agent_that_swallows_the_error_is_no_completed_episode(stage: Stage) -> None:
    access, llm = await opened(stage)
    assert await ask(llm)
    stage.engine.faults.append(Fault("no_logprobs"))
    with pytest.raises(openai.APIError):
        await ask(llm)
    summary = await stage.client.finish(access.session_id, output="I give up", reward=0)
    assert (summary.outcome, summary.reward) == (Outcome.INFRA_ERROR, None)


@pytest.mark.parametrize("told", ["timeout", "agent_error"])
async def test_what_ends_while_no_engine_serves_is_not_the_policys_failure(stage: Stage, told: str) -> None:
    """The deadline of the agent's process passes, or its client gives up waiting."""
    access, llm = await opened(stage)
    await stage.engine.stop()
    call = asyncio.create_task(ask(llm))
    await eventually(lambda: stage.gateway.pool.waiting == 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await eventually(lambda: stage.gateway.pool.waiting == 0)
    found = await stage.client.finish(access.session_id, outcome=told)
    assert found.outcome is Outcome.INFRA_ERROR
    assert "no engine was available, or it was lost, " in str(found.error)


async def test_a_timeout_after_an_engine_was_lost_is_not_the_policys(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("drop"))
    await ask(llm)
    found = await stage.client.finish(access.session_id, outcome="timeout")
    assert found.outcome is Outcome.INFRA_ERROR


async def test_a_timeout_with_engines_that_serve_is_the_policys(stage: Stage) -> None:
    access, llm = await opened(stage)
    await ask(llm)
    found = await stage.client.finish(access.session_id, outcome="timeout")
    assert found.outcome is Outcome.TIMEOUT


async def test_an_agent_that_recovers_is_a_completed_one(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("no_logprobs"))
    with pytest.raises(openai.APIError):
        await ask(llm)
    assert await ask(llm)
    assert (await ended(stage, access)).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    "fault", [Fault("no_versions"), *(Fault("version", one) for one in ("default", "", None, "-1", 1.5))]
)
async def test_an_unknown_version_is_recorded_as_unknown(stage: Stage, fault: Fault) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(fault)
    await ask(llm)
    trajectory = await ended(stage, access)
    assert trajectory.turns[0].version_spans == ()
    assert trajectory.oldest_version() is None
    assert "unknown_version_turns_total 1" in await stage.client.metrics()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_is_continued_within_the_call(stage: Stage, stream: bool) -> None:
    access, llm = await opened(stage)
    text = "one two three four five six"
    ids = stage.say(text)
    stage.engine.version = "4"
    stage.engine.faults.append(Fault("abort", 3))
    stage.engine.replies.append(ids[3:])

    call = asyncio.create_task(ask(llm, stream))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    stage.engine.version = "5"
    assert await call == text
    first, second = stage.engine.requests
    assert second["input_ids"] == [*first["input_ids"], *ids[:3]]
    budgets = [one["sampling_params"]["max_new_tokens"] for one in (first, second)]
    assert budgets == [256, 253]
    [turn] = (await ended(stage, access)).turns
    assert turn.output_ids.tolist() == ids
    assert len(turn.logprobs) == len(ids)
    assert turn.oldest_version() in (4, 5)
    assert turn.version_spans[-1] == VersionSpan(5, turn.version_spans[-1].start, len(ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_that_straddles_a_continuation_ends_the_reply(stage: Stage, stream: bool) -> None:
    """Each engine call saw only a part of it; what was sampled after it is neither shown nor kept."""
    access, llm = await opened(stage)
    ids = stage.say("one two STOP three four")
    cut = len(stage.gateway.renderer.encode("one two ST"))
    end = len(stage.gateway.renderer.encode("one two STOP"))
    stage.engine.faults.append(Fault("abort", cut))
    stage.engine.replies.append(ids[cut:])
    options: dict[str, Any] = {"model": "m", "messages": ASK, "stop": ["STOP"], "stream": stream}
    reply = await llm.chat.completions.create(**options)
    if stream:
        chunks = [chunk.choices[0] async for chunk in reply]
        text, finish = "".join(one.delta.content or "" for one in chunks), chunks[-1].finish_reason
    else:
        text, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert (text, finish) == ("one two ", "stop")
    first, second = stage.engine.requests
    assert (first["stream"], second["stream"]) == (True, True), "what is ended in time is streamed"
    await stage.engine.until(lambda: stage.engine.aborted == [second["rid"]])
    [turn] = (await ended(stage, access)).turns
    assert turn.output_ids.tolist() == ids[:end]
    assert turn.version_spans == (VersionSpan(0, 0, end),)
    assert len(turn.logprobs) == end


async def test_a_reply_aborted_at_its_last_token_is_whole(stage: Stage) -> None:
    access, llm = await opened(stage)
    ids = stage.say("one two three")
    stage.engine.faults.append(Fault("abort", 3))
    reply = await llm.chat.completions.create(model="m", messages=ASK, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert len(stage.engine.requests) == 1
    assert (await ended(stage, access)).turns[0].output_ids.tolist() == ids[:3]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_aborted_before_its_first_token_is_asked_again(stage: Stage, stream: bool) -> None:
    access, llm = await opened(stage)
    ids = stage.say("one")
    stage.engine.faults.extend([Fault("abort", 0), Fault("none")])
    stage.engine.replies.append(ids)
    assert await ask(llm, stream) == "one"
    assert len({tuple(one["input_ids"]) for one in stage.engine.requests}) == 1
    assert (await ended(stage, access)).turns[0].output_ids.tolist() == ids


async def test_a_continuation_draws_on_from_a_seed_of_its_own(stage: Stage) -> None:
    """Engines draw by seed and place in the call: the same seed would give the same numbers again."""
    seeds = []
    for _ in range(2):
        _, llm = await opened(stage, seed=7)
        ids = stage.say("one two three four")
        stage.engine.faults.append(Fault("abort", 3))
        stage.engine.replies.append(ids[3:])
        await ask(llm)
        seeds.append([one["sampling_params"]["sampling_seed"] for one in stage.engine.requests[-2:]])
    assert seeds[0] == seeds[1], "the same session seed gives the same seeds"
    assert seeds[0][0] != seeds[0][1]


async def test_a_stream_that_breaks_off_is_continued(stage: Stage) -> None:
    """What the client has seen stays; the versions of those tokens came with their events."""
    access, llm = await opened(stage)
    text = "one two three four five six"
    ids = stage.say(text)
    stage.engine.faults.append(Fault("break", 4))
    stage.engine.replies.append(ids[4:])
    assert await ask(llm, stream=True) == text
    [turn] = (await ended(stage, access)).turns
    assert turn.output_ids.tolist() == ids
    assert turn.oldest_version() == 0


LISTED = Sampling(top_logprobs=3)


async def test_an_interrupted_reply_goes_on_with_its_likeliest_ids(stage: Stage) -> None:
    access, llm = await opened(stage, sampling=LISTED)
    ids = stage.say("one two three four")
    stage.engine.faults.append(Fault("abort", 3))
    stage.engine.replies.append(ids[3:])
    await ask(llm)
    assert [one["top_logprobs_num"] for one in stage.engine.requests] == [3, 3]
    [turn] = (await ended(stage, access)).turns
    assert turn.top_ids is not None
    assert turn.top_ids.reshape(-1, 3).tolist() == [[one, one + 1, one + 2] for one in ids]
    await ask((await opened(stage))[1])
    assert "top_logprobs_num" not in stage.engine.requests[-1], "of a session that does not ask for them"


@pytest.mark.parametrize(("fault", "stream"), [(Fault("no_top"), False), (Fault("break", 4), True)])
async def test_no_token_is_recorded_without_the_likeliest_ids_that_were_asked_for(
    stage: Stage, fault: Fault, stream: bool
) -> None:
    """Of an engine that does not report them, or a stream whose last event was lost."""
    access, llm = await opened(stage, sampling=LISTED)
    ids = stage.say("one two three four five six")
    stage.engine.faults.append(fault)
    stage.engine.replies.append(ids[4:])
    with pytest.raises(openai.APIError):
        await ask(llm, stream=stream)
    assert len(stage.engine.requests) == 1
    trajectory = await ended(stage, access)
    assert (trajectory.outcome, trajectory.turns) == (Outcome.INFRA_ERROR, [])


NARROWED = Sampling(top_p=0.9, top_k=20)


async def test_an_interrupted_reply_goes_on_with_its_kept_ids(stage: Stage) -> None:
    access, llm = await opened(stage, sampling=NARROWED)
    ids = stage.say("one two three four")
    stage.engine.faults.append(Fault("abort", 3))
    stage.engine.replies.append(ids[3:])
    await ask(llm)
    assert [one["return_sampling_mask"] for one in stage.engine.requests] == [True, True]
    [turn] = (await ended(stage, access)).turns
    assert turn.kept_ids is not None
    assert turn.kept_ids.reshape(-1, 2).tolist() == [[one, one + 1] for one in ids]
    access, llm = await opened(stage, sampling=NARROWED)
    stage.say("one two")
    stage.engine.faults.append(Fault("no_kept"))
    with pytest.raises(openai.APIError):
        await ask(llm)
    trajectory = await ended(stage, access)
    assert (trajectory.outcome, trajectory.turns) == (Outcome.INFRA_ERROR, [])


async def test_sessions_keep_their_engine_and_new_ones_go_where_there_is_room(stage: Stage) -> None:
    other = FakeEngine(stage.engine.decode, stop_id=2)
    await other.start()
    stage.stack.push_async_callback(other.stop)
    await stage.client.add_engine(other.url)
    await eventually(lambda: all(engine.healthy for engine in stage.gateway.pool.engines()))
    stage.engine.faults.append(Fault("hold"))
    other.faults.append(Fault("hold"))
    busy = [await opened(stage) for _ in range(2)]
    calls = [asyncio.create_task(ask(llm)) for _, llm in busy]
    for engine in (stage.engine, other):  # one call each
        await engine.until(lambda e=engine: len(e.requests) == 1)
    for engine in (stage.engine, other):
        engine.release()
    await asyncio.gather(*calls)
    for _ in range(3):
        await asyncio.gather(*(ask(llm) for _, llm in busy))
    assert [len(engine.requests) for engine in (stage.engine, other)] == [4, 4]
    await other.stop()
    await asyncio.gather(*(ask(llm) for _, llm in busy))
    assert len(stage.engine.requests) == 6


async def test_a_call_after_the_end_is_refused_and_changes_nothing(stage: Stage) -> None:
    access, llm = await opened(stage)
    await ask(llm)
    first = await stage.client.finish(access.session_id, output="3", reward=1)
    with pytest.raises(openai.PermissionDeniedError, match="it was finished") as raised:
        await ask(llm)
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert await stage.client.finish(access.session_id, output="4", reward=0) == first
    assert len((await stage.client.trajectory(access.session_id)).turns) == 1
    assert len(stage.engine.requests) == 1


@pytest.mark.parametrize("how", ["finish", "delete", "drop"])
async def test_the_end_of_a_session_aborts_what_it_generates(stage: Stage, how: str) -> None:
    access, llm = await opened(stage, group_id="g1", slot=0)
    stage.engine.faults.append(Fault("hang"))
    call = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    if how == "finish":
        summary = await stage.client.finish(access.session_id, reward=1)
        assert summary.outcome is Outcome.AGENT_ERROR
        assert "never called" in str(summary.error)
    elif how == "delete":
        await stage.client.delete_session(access.session_id)
    else:
        await stage.client.drop_group("g1")
    await stage.engine.until(lambda: stage.engine.aborted == [stage.engine.requests[0]["rid"]])
    with pytest.raises(openai.PermissionDeniedError):
        await call


async def test_a_reply_that_meets_the_end_of_its_session_is_not_delivered(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trajectory of a finished session never changes, so the late reply is refused."""
    access, llm = await opened(stage)
    session = stage.gateway.session(access.session_id)
    await ask(llm)

    recorded = stage.gateway.journal.recorded

    def recorded_and_finished(session: GatewaySession, nodes: Any) -> Any:
        session.close("it was finished")
        return recorded(session, nodes)

    monkeypatch.setattr(stage.gateway.journal, "recorded", recorded_and_finished)
    with pytest.raises(openai.PermissionDeniedError):
        await ask(llm)
    assert [node.turn.delivered for node in session.tree.nodes] == [True, False]


async def test_errors_have_the_dialects_shape(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("no_logprobs"))
    with pytest.raises(openai.APIStatusError) as raised:
        await ask(llm)
    error = json.loads(raised.value.response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (raised.value.status_code, error["type"]) == (424, "engine_error")
    assert access.api_key not in raised.value.response.text
