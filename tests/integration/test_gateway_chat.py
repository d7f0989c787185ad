"""The real `openai` SDK against a gateway: replies, streams, tools, retries, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import orjson
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.fakes import Fault, Stage, eventually, logprob_of, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway import exchange
from tidegate.gateway.calls import Call
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.turns import Ask, digest_of
from tidegate.types import Outcome, Sampling, Task, VersionSpan

TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer="3")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
ASK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]


@pytest.fixture(params=["qwen3"])
async def stage(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with staged(make_model_dir(tmp_path / "tiny", request.param)) as made:
        yield made


async def opened(stage: Stage, **options: Any) -> tuple[SessionAccess, AsyncOpenAI]:
    access = await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options})
    return access, await stage.llm(access, max_retries=0)


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


async def whole(llm: AsyncOpenAI, messages: list[Any], **options: Any) -> dict[str, Any]:
    reply = await llm.chat.completions.create(model="m", messages=messages, tools=TOOLS, **options)
    calls = bool(reply.choices[0].message.tool_calls)
    assert reply.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    return reply.choices[0].message.model_dump(exclude_none=True)


async def streamed(llm: AsyncOpenAI, messages: list[Any], **options: Any) -> dict[str, Any]:
    async with llm.chat.completions.stream(model="m", messages=messages, tools=TOOLS, **options) as stream:
        async for _ in stream:
            pass
        reply = await stream.get_final_completion()
    calls = bool(reply.choices[0].message.tool_calls)
    assert reply.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    message = reply.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", ()):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    message.pop("parsed", None)
    return message


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


async def test_stop_strings_end_the_text(stage: Stage) -> None:
    access, llm = await opened(stage)
    ids = stage.say("One STOP two", ended=False)
    reply = await llm.chat.completions.create(model="m", messages=ASK, stop=["STOP"])
    assert reply.choices[0].message.content == "One "
    assert reply.choices[0].finish_reason == "stop"
    assert stage.engine.requests[0]["sampling_params"]["stop"] == ["STOP"]
    await stage.client.finish(access.session_id, reward=0)
    [turn] = (await stage.client.trajectory(access.session_id)).turns
    assert turn.output_ids.tolist() == ids  # what was sampled stays what was sampled


async def test_logprobs_are_given_where_asked_for(stage: Stage) -> None:
    _, llm = await opened(stage)
    ids = stage.say("Four")
    reply = await llm.chat.completions.create(model="m", messages=ASK, logprobs=True)
    assert reply.choices[0].logprobs is not None
    rows = reply.choices[0].logprobs.content
    assert rows is not None
    assert len(rows) == len(ids)
    assert "".join(row.token for row in rows[:-1]) == "Four"
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
    with pytest.raises(openai.APIStatusError, match="not JSON"):
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


NAMED: Any = {"type": "function", "function": {"name": "calculator"}}


@pytest.mark.parametrize(
    ("choice", "start"),
    [("required", '<tool_call>\n{"name":'), (NAMED, '<tool_call>\n{"name": "calculator", "arguments":')],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_demanded_call_begins_in_the_prompt(
    stage: Stage, choice: Any, start: str, stream: bool
) -> None:
    access, llm = await opened(stage)
    ids = stage.say(CALL.replace('":', '": ').replace(":  ", ": ").removeprefix(start))
    message = await (streamed if stream else whole)(llm, list(ASK), tool_choice=choice)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression":"1+2"}'}
    prompt = stage.engine.requests[0]["input_ids"]
    assert stage.gateway.renderer.decode(prompt).endswith("assistant\n" + start)
    messages = [*ASK, message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    await llm.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert stage.engine.requests[1]["input_ids"][: len(prompt) + len(ids)] == [*prompt, *ids]
    await stage.client.finish(access.session_id, reward=0)
    first = (await stage.client.trajectory(access.session_id)).turns[0]
    assert first.output_ids.tolist() == ids  # what was forced is not sampled, and not trained on


async def test_a_demanded_call_that_is_malformed_is_content(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say(" oops")
    reply = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS, tool_choice="required")
    assert reply.choices[0].message.content == '<tool_call>\n{"name": oops'
    await stage.client.finish(access.session_id, reward=0)
    assert (await stage.client.trajectory(access.session_id)).turns[0].parse == "malformed"


async def test_a_single_call_ends_the_reply(stage: Stage) -> None:
    _, llm = await opened(stage)
    stage.say(CALL, ended=False)
    reply = await llm.chat.completions.create(
        model="m", messages=ASK, tools=TOOLS, parallel_tool_calls=False, stop="END"
    )
    assert stage.engine.requests[0]["sampling_params"]["stop"] == ["END", "</tool_call>"]
    assert reply.choices[0].message.tool_calls is not None
    assert reply.choices[0].finish_reason == "tool_calls"


async def test_a_model_without_calls_of_its_own_refuses_to_be_made_to_call(tmp_path: Path) -> None:
    async with staged(make_model_dir(tmp_path / "tiny"), tool_parser="none") as stage:
        _, llm = await opened(stage)
        for name, value in (("tool_choice", "required"), ("parallel_tool_calls", False)):
            with pytest.raises(openai.BadRequestError, match=name):
                await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS, **{name: value})  # type: ignore[call-overload]
        assert stage.engine.requests == []


class Answer(BaseModel):
    value: int


async def test_a_schema_goes_to_the_engine_in_evaluation_and_is_refused_in_training(stage: Stage) -> None:
    _, llm = await opened(stage, split="eval")
    stage.say('{"value": 3}')
    reply = await llm.chat.completions.parse(model="m", messages=ASK, response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(value=3)
    sent = orjson.loads(stage.engine.requests[0]["sampling_params"]["json_schema"])
    assert sent["properties"]["value"]["type"] == "integer"
    _, llm = await opened(stage)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        await llm.chat.completions.parse(model="m", messages=ASK, response_format=Answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", [True, False])
async def test_reasoning_is_told_apart_and_may_be_left_out_of_histories(
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
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)
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


async def test_parallel_calls_and_sub_agents_are_branches(stage: Stage) -> None:
    access, llm = await opened(stage)
    first = await llm.chat.completions.create(model="m", messages=ASK)
    history = [*ASK, first.choices[0].message.model_dump(exclude_none=True)]
    await asyncio.gather(
        *(
            llm.chat.completions.create(model="m", messages=[*history, {"role": "user", "content": text}])
            for text in ("left", "right")
        ),
        llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "a sub-agent"}]),
    )
    await stage.client.finish(access.session_id, reward=0)
    turns = (await stage.client.trajectory(access.session_id)).turns
    assert sorted(str(turn.parent) for turn in turns) == ["0", "0", "None", "None"]
    assert sum(turn.branch is not None for turn in turns) == 2
    sampled = sum(len(stage.engine.output_for(one["input_ids"], 99)) for one in stage.engine.requests)
    assert sum(len(turn.output_ids) for turn in turns) == sampled


async def test_identical_requests_are_separate_samples(stage: Stage) -> None:
    access, llm = await opened(stage, seed=1)
    for _ in range(2):
        await llm.chat.completions.create(model="m", messages=ASK)
    first, second = stage.engine.requests
    assert first["sampling_params"]["sampling_seed"] != second["sampling_params"]["sampling_seed"]
    summary = await stage.client.finish(access.session_id, reward=0)
    assert summary.turns == 2


async def test_the_same_session_seed_gives_the_same_seeds(stage: Stage) -> None:
    for _ in range(2):
        _, llm = await opened(stage, seed=5)
        await llm.chat.completions.create(model="m", messages=ASK, seed=1)
    first, second = stage.engine.requests
    assert first["sampling_params"] == second["sampling_params"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 129}, "n must be at most"),
    ({"response_format": {"type": "json_object"}}, "response_format: .* training"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice.*'f'"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"extra_body": {"guided_regex": "x"}}, "guided_regex"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
    ({"temperature": 3}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"messages": []}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "image_url",
    ),
]


async def test_what_cannot_be_honoured_is_refused_by_name(stage: Stage) -> None:
    access, llm = await opened(stage)
    retrying = llm.with_options(max_retries=3)
    for parameters, name in REFUSED:
        with pytest.raises(openai.BadRequestError, match=name) as raised:
            await retrying.chat.completions.create(**{"model": "m", "messages": ASK, **parameters})
        assert raised.value.response.headers["x-should-retry"] == "false"
    assert stage.engine.requests == []
    assert (await stage.client.finish(access.session_id)).outcome is Outcome.AGENT_ERROR


async def test_neutral_values_are_no_reason_to_refuse(stage: Stage) -> None:
    _, llm = await opened(stage)
    await llm.chat.completions.create(
        model="m", messages=ASK, n=1, response_format={"type": "text"}, logit_bias={}, top_p=1,
        frequency_penalty=0, presence_penalty=0, parallel_tool_calls=True, tool_choice="auto", user="me",
        store=False, metadata={"a": "b"}, logprobs=False, extra_body={"top_k": -1, "min_p": 0},
    )  # fmt: skip
    assert len(stage.engine.requests) == 1


async def test_evaluation_honours_the_agent_and_training_does_not(stage: Stage) -> None:
    for split, expected in (("train", 1.0), ("eval", 0.25)):
        _, llm = await opened(stage, split=split)
        await llm.chat.completions.create(model="m", messages=ASK, temperature=0.25)
        assert stage.engine.requests[-1]["sampling_params"]["temperature"] == expected


async def test_tool_choice_none_reads_no_calls_and_keeps_the_prompt(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say(CALL)
    first = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    history = [*ASK, first.choices[0].message.model_dump(exclude_none=True)]
    stage.say(CALL)
    second = await llm.chat.completions.create(
        model="m", messages=[*history, {"role": "user", "content": "now say it"}], tools=TOOLS,
        tool_choice="none",
    )  # fmt: skip
    assert second.choices[0].message.content == CALL
    await stage.client.finish(access.session_id, reward=0)
    assert (await stage.client.trajectory(access.session_id)).turns[1].branch is None


async def test_changed_tools_are_an_explicit_branch(stage: Stage) -> None:
    access, llm = await opened(stage)
    first = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    history = [*ASK, first.choices[0].message.model_dump(exclude_none=True), ASK[1]]
    await llm.chat.completions.create(model="m", messages=history)
    await stage.client.finish(access.session_id, reward=0)
    second = (await stage.client.trajectory(access.session_id)).turns[1]
    assert second.parent is None
    assert second.branch == "tools: they or the template's options differ from those of turn 0"
    assert 'branches_total{reason="tools"} 1' in await stage.client.metrics()


@pytest.mark.parametrize("stage", ["shouting"], indirect=True)
async def test_a_template_that_permits_no_follow_up_renders_whole_and_says_so(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.stop_id = 2
    messages = list(ASK)
    for _ in range(2):
        reply = await llm.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), ASK[1]]
    await stage.client.finish(access.session_id, reward=0)
    second = (await stage.client.trajectory(access.session_id)).turns[1]
    assert second.parent is None
    assert str(second.branch).startswith("template: ")


async def test_a_prompt_over_the_budget_is_refused_and_never_cut(stage: Stage) -> None:
    stage.engine.max_context = 64
    await stage.client.remove_engine(stage.engine.url)
    await stage.client.add_engine(stage.engine.url)
    await eventually(lambda: stage.gateway.pool.max_context == 64)
    _, llm = await opened(stage)
    with pytest.raises(openai.BadRequestError) as raised:
        await llm.with_options(max_retries=3).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "many words " * 60}]
        )
    assert raised.value.code == "context_length_exceeded"
    assert stage.engine.requests == []
    reply = await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "few"}])
    assert reply.usage is not None
    budget = stage.engine.requests[0]["sampling_params"]["max_new_tokens"]
    assert budget + reply.usage.prompt_tokens == 64


async def test_models_and_the_plain_v1_address(stage: Stage) -> None:
    access, llm = await opened(stage)
    plain = llm.with_options(base_url=f"{stage.url}/v1")
    for client in (llm, plain):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        await client.chat.completions.create(model="m", messages=ASK)
    assert (await stage.client.finish(access.session_id, reward=0)).turns == 2


# -- retries: the raw HTTP that an SDK would send ------------------------------------------------------


async def post(
    access: SessionAccess, http: aiohttp.ClientSession, body: dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    told = {"Authorization": f"Bearer {access.api_key}", **headers}
    url = f"{access.base_url}/chat/completions"
    async with http.post(url, data=orjson.dumps(body), headers=told) as response:
        return response.status, orjson.loads(await response.read())


async def test_an_idempotency_key_gets_the_same_turn_again(stage: Stage) -> None:
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    async with aiohttp.ClientSession() as http:
        key = {"Idempotency-Key": "k1"}
        first, again = await post(access, http, body, **key), await post(access, http, body, **key)
        other = await post(access, http, {**body, "messages": ASK[1:]}, **key)
    assert first == again
    assert (other[0], "another body" in other[1]["error"]["message"]) == (400, True)
    assert len(stage.engine.requests) == 1


async def test_a_retry_joins_the_call_that_is_under_way(stage: Stage) -> None:
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    stage.engine.faults.append(Fault("hold"))
    async with aiohttp.ClientSession() as http:
        first = asyncio.create_task(post(access, http, body))
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        retry = asyncio.create_task(post(access, http, body, **{"x-stainless-retry-count": "1"}))
        await eventually(lambda: stage.gateway.metrics.retries_joined)
        stage.engine.release()
        assert await first == await retry
    assert len(stage.engine.requests) == 1


async def test_a_retry_of_a_delivered_turn_is_a_sample_of_its_own(stage: Stage) -> None:
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    async with aiohttp.ClientSession() as http:
        await post(access, http, body)
        await post(access, http, body, **{"x-stainless-retry-count": "1"})
    assert len(stage.engine.requests) == 2


async def test_a_retry_of_an_abandoned_call_does_not_share_its_twins_sample(stage: Stage) -> None:
    """Two identical calls run; one client leaves and retries: the other one's reply is not for it."""
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    stage.engine.faults.extend([Fault("hold"), Fault("hang")])
    async with aiohttp.ClientSession() as http:
        twin = asyncio.create_task(post(access, http, body))
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        left = asyncio.create_task(post(access, http, body))
        await stage.engine.until(lambda: len(stage.engine.requests) == 2)
        left.cancel()
        await stage.engine.until(lambda: bool(stage.engine.aborted))
        retried = await post(access, http, body, **{"x-stainless-retry-count": "1"})
        stage.engine.release()
        assert (await twin)[1]["id"] != retried[1]["id"]
    assert len(stage.engine.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_generation(stage: Stage, stream: bool) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("hang"))
    call = asyncio.create_task(llm.chat.completions.create(model="m", messages=ASK, stream=stream))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    call.cancel()
    await stage.engine.until(lambda: stage.engine.aborted == [stage.engine.requests[0]["rid"]])
    stage.say("again")
    retried = await llm.with_options(
        default_headers={"x-stainless-retry-count": "1"}
    ).chat.completions.create(model="m", messages=ASK)
    assert retried.choices[0].message.content == "again"
    assert (await stage.client.finish(access.session_id, reward=0)).turns == 1


async def made(call: Call) -> None:
    """Until a call that nobody listens to is over."""
    assert call.task is not None
    await call.task


async def test_a_turn_that_was_not_delivered_is_recorded_as_such_and_given_to_the_retry(
    stage: Stage,
) -> None:
    """Two wait for one call; the reply comes while neither takes it."""
    access, _ = await opened(stage)
    session = stage.gateway.session(access.session_id)
    stage.say("lost")
    body = orjson.dumps({"model": "m", "messages": ASK})
    ask = Ask(ASK, digest=digest_of(b"tidegate.gateway.dialects.chat/0/" + body))
    await made(stage.gateway.turns.call(session, ask))
    assert [node.turn.delivered for node in session.tree.nodes] == [False]
    assert (await stage.client.list_groups()) == []
    async with aiohttp.ClientSession() as http:
        status, reply = await post(access, http, orjson.loads(body), **{"x-stainless-retry-count": "1"})
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "lost")
    assert len(stage.engine.requests) == 1
    await stage.client.finish(access.session_id, reward=0)
    assert [t.delivered for t in (await stage.client.trajectory(access.session_id)).turns] == [True]


async def test_who_quotes_a_reply_has_it(stage: Stage) -> None:
    access, llm = await opened(stage)
    session = stage.gateway.session(access.session_id)
    stage.say("lost, it seemed")
    await made(stage.gateway.turns.call(session, Ask(ASK)))
    history = [*ASK, {"role": "assistant", "content": "lost, it seemed"}, ASK[1]]
    await llm.chat.completions.create(model="m", messages=history)
    assert [node.turn.delivered for node in session.tree.nodes] == [True, True]
    assert stage.gateway.metrics.undelivered_turns == 0
