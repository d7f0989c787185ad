"""The real `openai` SDK against a gateway: replies, streams, tools, choices, reasoning."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from tests.fakes import Fault, Stage, logprob_of
from tests.integration.gateway.chat_calls import ASK, TOOLS, streamed, whole
from tests.integration.gateway.sdk_stage import CALL, opened, stage
from tidegate.gateway.http import endpoints
from tidegate.turn import VersionSpan
from tidegate.types import Outcome, Sampling

__all__ = ["stage"]


async def test_a_reply_and_the_turn_it_makes(stage: Stage) -> None:
    access, llm = await opened(stage, sampling=Sampling(0.7, max_tokens=50))
    stage.engine.version = "12"
    ids = stage.say("It is 3.")
    reply = await llm.chat.completions.create(model="anything", messages=ASK)
    [choice] = reply.choices
    assert (choice.message.content, choice.finish_reason) == ("It is 3.", "stop")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(ids)
    [request] = stage.engine.requests
    assert request["sampling_params"] == {
        "temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop_token_ids": [2], "max_new_tokens": 50,
    }  # fmt: skip
    assert len(request["rid"]) == 32
    summary = await stage.client.finish(access.session_id, reward=0.5)
    assert (summary.outcome, summary.reward, summary.turns) == (Outcome.COMPLETED, 0.5, 1)
    assert summary.oldest_version == 12
    trajectory = await stage.client.trajectory(access.session_id)
    [turn] = trajectory.turns
    assert turn.delta_ids.tolist() == request["input_ids"]
    assert turn.output_ids.tolist() == ids
    assert turn.logprobs.tolist() == [np.float32(logprob_of(one, i)) for i, one in enumerate(ids)]
    assert turn.version_spans == (VersionSpan(12, 0, len(ids)),)
    assert (turn.delivered, turn.temperature, turn.finish_reason) == (True, 0.7, "stop")
    assert trajectory.messages == [*ASK, {"role": "assistant", "content": "It is 3."}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["qwen2", "qwen3", "mistral", "counting"], indirect=True)
async def test_a_tool_loop_extends_the_recorded_ids(stage: Stage, stream: bool) -> None:
    access, llm = await opened(stage)
    messages = list(ASK)
    prompts = []
    for number in range(4):
        said = stage.say("Let me see.\n" + CALL if number < 3 else "#### 3")
        message = await (streamed if stream else whole)(llm, messages)
        request = stage.engine.requests[-1]
        for earlier in prompts:
            assert request["input_ids"][: len(earlier)] == earlier
        prompts.append([*request["input_ids"], *said])
        messages.append(message)
        if number < 3:
            assert message["content"] == "Let me see."
            [call] = message["tool_calls"]
            assert call["function"] == {"name": "calculator", "arguments": '{"expression":"1+2"}'}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
    assert messages[-1]["content"] == "#### 3"
    await stage.client.finish(access.session_id, reward=1)
    trajectory = await stage.client.trajectory(access.session_id)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2]
    assert [turn.branch for turn in trajectory.turns] == [None] * 4
    assert [turn.parse for turn in trajectory.turns] == ["ok", "ok", "ok", None]
    assert trajectory.prompt_ids(trajectory.turns[-1]).tolist() == stage.engine.requests[-1]["input_ids"]


async def test_a_stream_comes_as_it_is_sampled(stage: Stage) -> None:
    _, llm = await opened(stage)
    ids = stage.say("One, two, three, four, five.")
    stage.engine.stream_delay = asyncio.Event()
    stream = await llm.chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        if chunk.choices and chunk.choices[0].delta.content:
            stage.engine.stream_delay.set()  # the first text is here while the rest is not sampled yet
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        "One, two, three, four, five."
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids)


async def test_a_malformed_call_comes_back_as_content(stage: Stage) -> None:
    access, llm = await opened(stage)
    text = 'Hm. <tool_call>\n{"name": oops}\n</tool_call>'
    stage.say(text)
    reply = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    assert reply.choices[0].message.content == text
    assert reply.choices[0].message.tool_calls is None
    await stage.client.finish(access.session_id, reward=0)
    assert (await stage.client.trajectory(access.session_id)).turns[0].parse == "malformed"


async def test_a_reply_cut_by_length_and_continued(stage: Stage) -> None:
    access, llm = await opened(stage, sampling=Sampling(max_tokens=4))
    ids = stage.say("One, two, three, four")[:4]
    reply = await llm.chat.completions.create(model="m", messages=ASK)
    assert reply.choices[0].finish_reason == "length"
    messages = [*ASK, reply.choices[0].message.model_dump(exclude_none=True)]
    stage.say("on", ended=True)
    await llm.chat.completions.create(
        model="m", messages=[*messages, {"role": "user", "content": "go on"}], max_completion_tokens=3
    )
    first, second = stage.engine.requests
    assert second["input_ids"][: len(first["input_ids"]) + 4] == [*first["input_ids"], *ids]
    assert second["input_ids"][len(first["input_ids"]) + 4] == 2  # the end of turn, as a prompt token
    assert second["sampling_params"]["max_new_tokens"] == 3
    summary = await stage.client.finish(access.session_id, reward=0)
    assert summary.outcome is Outcome.COMPLETED


async def test_a_session_whose_last_reply_was_cut_is_truncated(stage: Stage) -> None:
    access, llm = await opened(stage, sampling=Sampling(max_tokens=2))
    stage.say("One, two, three")
    await llm.chat.completions.create(model="m", messages=ASK)
    summary = await stage.client.finish(access.session_id, reward=0)
    assert summary.outcome is Outcome.TRUNCATED


async def test_logprobs_are_given_where_asked_for(stage: Stage) -> None:
    _, llm = await opened(stage)
    ids = stage.say("Four 🐙")
    reply = await llm.chat.completions.create(model="m", messages=ASK, logprobs=True)
    assert reply.choices[0].logprobs is not None
    rows = reply.choices[0].logprobs.content
    assert rows is not None
    assert len(rows) == len(ids)
    assert "".join(row.token for row in rows[:-5]) == "Four "
    assert [row.bytes for row in rows[-5:-1]] == [None] * 4, "parts of a character"
    assert b"".join(bytes(row.bytes or ()) for row in rows[:-5]) == b"Four "
    assert rows[0].logprob == pytest.approx(logprob_of(ids[0], 0))


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_samples_of_their_own(stage: Stage, stream: bool) -> None:
    access, llm = await opened(stage, split="eval")
    texts = ["One.", "Two.", "Three."]
    ids = [stage.say(text) for text in texts]
    asked: Any = {"model": "m", "messages": ASK, "n": 3, "seed": 7, "logprobs": True}
    if stream:
        async with llm.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
            reply: Any = await events.get_final_completion()
    else:
        reply = await llm.chat.completions.create(**asked)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert sorted(choice.message.content for choice in reply.choices) == sorted(texts)
    assert sorted(len(choice.logprobs.content) for choice in reply.choices) == sorted(map(len, ids))
    assert reply.usage.completion_tokens == sum(map(len, ids))
    assert reply.usage.prompt_tokens == len(stage.engine.requests[0]["input_ids"])
    assert sorted(one["sampling_params"]["sampling_seed"] for one in stage.engine.requests) == [7, 8, 9]
    assert (await stage.client.finish(access.session_id, reward=0)).turns == 3
    assert stage.gateway.metrics.undelivered_turns == 0


async def test_where_one_choice_fails_all_are_abandoned(stage: Stage) -> None:
    _, llm = await opened(stage)
    stage.engine.faults.extend([Fault("hang"), Fault("garbage")])
    with pytest.raises(openai.APIStatusError, match="invalid JSON"):
        await llm.chat.completions.create(model="m", messages=ASK, n=2)
    await stage.engine.until(lambda: len(stage.engine.aborted) == 1)


async def test_logprobs_come_with_a_stream_s_end(stage: Stage) -> None:
    _, llm = await opened(stage)
    ids = stage.say("Four")
    stream = await llm.chat.completions.create(model="m", messages=ASK, stream=True, logprobs=True)
    last = [chunk async for chunk in stream][-1].choices[0]
    assert last.finish_reason == "stop"
    assert last.logprobs is not None
    assert [row.logprob for row in last.logprobs.content or ()] == [
        pytest.approx(logprob_of(one, i)) for i, one in enumerate(ids)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", [True, False])
async def test_reasoning_is_separate_and_may_be_omitted_from_histories(
    stage: Stage, stream: bool, kept: bool
) -> None:
    access, llm = await opened(stage)
    ids = stage.say(f"<think>\nOne and\ntwo.\n</think>\n\nI ask.\n{CALL}")
    message = await (streamed if stream else whole)(llm, list(ASK))
    assert message["reasoning_content"] == "One and\ntwo."
    assert message["content"] == "I ask."
    [call] = message["tool_calls"]
    if not kept:
        del message["reasoning_content"]
    messages = [*ASK, message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    await llm.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    first, second = stage.engine.requests
    assert second["input_ids"][: len(first["input_ids"]) + len(ids)] == [*first["input_ids"], *ids]
    await stage.client.finish(access.session_id, reward=0)
    assert (await stage.client.trajectory(access.session_id)).turns[1].branch is None


async def test_a_silent_stream_is_kept_alive(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "KEEP_ALIVE_S", 0.02)
    access, _ = await opened(stage)
    stage.say("Four")
    stage.engine.faults.append(Fault("hold"))
    body = {"model": "m", "messages": ASK, "stream": True}
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{access.base_url}/chat/completions", json=body) as response,
    ):
        for _ in range(2):
            assert b": keep-alive" in b"".join([await response.content.readuntil(b"keep-alive\n\n")])
        stage.engine.release()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_models_and_the_plain_v1_address(stage: Stage) -> None:
    access, llm = await opened(stage)
    plain = llm.with_options(base_url=f"{stage.url}/v1")
    for client in (llm, plain):
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match=r"gpt/4.*'policy'") as raised:
            await client.models.retrieve("gpt/4")
        assert raised.value.code == "model_not_found"
        assert (await client.chat.completions.create(model="m", messages=ASK)).model == "policy"
    assert (await stage.client.finish(access.session_id, reward=0)).turns == 2
