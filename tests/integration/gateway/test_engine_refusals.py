"""Requests that the engine refuses get an error with the cause, which does not count as its failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.fakes import Fault, Stage, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.engines.engine import PoolOptions
from tidegate.types import Outcome, Task

TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer="3")
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objet"}}}
TOO_MUCH = "sampling_params.repetition_penalty = 3.0: it is more than 0 and at most 2"


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    times = PoolOptions(probe_every_s=60.0)  # what heals an engine here is not its probe
    async with staged(make_model_dir(tmp_path / "tiny"), pool=times) as made:
        yield made


async def opened(stage: Stage, split: str = "eval") -> tuple[SessionAccess, openai.AsyncOpenAI]:
    access = await stage.client.open_session(task=TASK, deadline_s=20.0, split=split)
    return access, await stage.llm(access, max_retries=3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "reason", "param"),
    [
        ({"extra_body": {"repetition_penalty": 3.0}}, TOO_MUCH, "repetition_penalty"),
        ({"response_format": SCHEMA}, "sampling_params.json_schema: objet is no type", "response_format"),
        ({"response_format": SCHEMA}, "Failed to compile json grammar: objet", "response_format"),
        ({"stop": ["x"]}, "sampling_params.stop = ['x']: no tokenizer", "stop"),
    ],
)
async def test_it_is_refused_by_the_agents_name_and_never_retried(
    stage: Stage, stream: bool, asked: dict[str, Any], reason: str, param: str
) -> None:
    _, llm = await opened(stage)
    stage.engine.faults.append(Fault("refuse", reason))
    with pytest.raises(openai.BadRequestError) as raised:
        await llm.chat.completions.create(model="m", messages=ASK, stream=stream, **asked)
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert (raised.value.param, raised.value.code) == (param, "unsupported_parameter")
    assert reason in str(raised.value)
    assert stage.engine.url not in str(raised.value)
    assert len(stage.engine.requests) == 1


async def test_refusals_are_not_counted_against_the_engine_and_blame_the_agent(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.extend([Fault("refuse", TOO_MUCH)] * 5)
    for _ in range(5):
        with pytest.raises(openai.BadRequestError):
            await llm.chat.completions.create(model="m", messages=ASK, extra_body={"repetition_penalty": 3.0})
    [engine] = stage.gateway.pool.engines()
    assert (engine.healthy, engine.failures, stage.gateway.pool.errors) == (True, 0, 0)
    await stage.client.finish(access.session_id, outcome="agent_error")
    assert (await stage.client.trajectory(access.session_id)).outcome is Outcome.AGENT_ERROR


async def test_what_the_agent_did_not_ask_for_is_an_engine_s_failure(stage: Stage) -> None:
    """In training the penalty is not passed on: an engine that refuses it all the same is at fault."""
    access, llm = await opened(stage, split="train")
    stage.engine.faults.append(Fault("refuse", TOO_MUCH))
    with pytest.raises(openai.APIStatusError) as raised:
        await llm.chat.completions.create(model="m", messages=ASK, extra_body={"repetition_penalty": 3.0})
    assert raised.value.status_code == 424
    await stage.client.finish(access.session_id, outcome="agent_error")
    assert (await stage.client.trajectory(access.session_id)).outcome is Outcome.INFRA_ERROR


async def test_the_other_dialects_say_it_in_their_own_shape(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("refuse", "sampling_params.json_schema: objet is no type"))
    with pytest.raises(openai.BadRequestError) as raised:
        await llm.responses.create(
            model="m", input="1+2?",
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "objet"}}},
        )  # fmt: skip
    assert raised.value.param == "text.format"
    stage.engine.faults.append(Fault("refuse", "sampling_params.stop = ['x']: no tokenizer"))
    claude = anthropic.AsyncAnthropic(base_url=access.base_url.removesuffix("/v1"), api_key=access.api_key)
    async with claude:
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences: refused by the engine") as told:
            await claude.messages.create(model="m", max_tokens=9, messages=ASK, stop_sequences=["x"])
    assert told.value.response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("asked", [{"frequency_penalty": 0.5}, {"response_format": {"type": "json_object"}}])
async def test_what_looks_at_the_whole_reply_is_sampled_anew_after_an_abort(
    stage: Stage, asked: dict[str, Any]
) -> None:
    """A grammar, or a penalty's counts, would begin again in the middle of the reply."""
    _, llm = await opened(stage)
    stage.engine.faults.append(Fault("abort", 2))
    stage.say("wrong")
    stage.say("right")
    reply = await llm.chat.completions.create(model="m", messages=ASK, **asked)
    assert reply.choices[0].message.content == "right"
    first, second = stage.engine.requests
    assert first["input_ids"] == second["input_ids"]
    assert first["sampling_params"] == second["sampling_params"]


async def test_a_stream_of_it_that_breaks_off_says_so(stage: Stage) -> None:
    _, llm = await opened(stage)
    stage.engine.faults.append(Fault("abort", 2))
    stage.say("wrong")
    with pytest.raises(openai.APIError, match="a reply with frequency_penalty cannot be resumed"):
        async for _ in await llm.chat.completions.create(
            model="m", messages=ASK, stream=True, frequency_penalty=0.5
        ):
            pass
    assert len(stage.engine.requests) == 1
