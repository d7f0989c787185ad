"""Sampling parameters and tool settings of chat requests: applied, overridden or refused with their name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from pydantic import BaseModel

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.chat_calls import ASK, TOOLS, streamed, whole
from tests.integration.gateway.sdk_stage import CALL, finished, opened, stage
from tests.tiny_tokenizer import make_model_dir
from tidegate.types import Outcome

__all__ = ["stage"]


async def test_stop_strings_end_the_text(stage: Stage) -> None:
    access, llm = await opened(stage)
    ids = stage.say("One STOP two", ended=False)
    reply = await llm.chat.completions.create(model="m", messages=ASK, stop=["STOP"])
    assert reply.choices[0].message.content == "One "
    assert reply.choices[0].finish_reason == "stop"
    # The model may reason, where the engine would stop, too: the gateway ends the reply.
    assert "stop" not in stage.engine.requests[0]["sampling_params"]
    await stage.client.finish(access.session_id, reward=0)
    [turn] = (await stage.client.trajectory(access.session_id)).turns
    read = turn.output_ids.tolist()
    assert read == ids[: len(read)]  # what was sampled stays what was sampled
    assert stage.gateway.renderer.decode(read) == "One STOP"
    assert turn.finish_reason == "stop"


class Answer(BaseModel):
    value: int


async def test_a_schema_goes_to_the_engine_in_evaluation_and_is_free_text_in_training(stage: Stage) -> None:
    _, llm = await opened(stage, split="eval")
    stage.say('{"value": 3}')
    reply = await llm.chat.completions.parse(model="m", messages=ASK, response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(value=3)
    sent = orjson.loads(stage.engine.requests[0]["sampling_params"]["json_schema"])
    assert sent["properties"]["value"]["type"] == "integer"
    _, llm = await opened(stage)
    stage.say('{"value": 4}')
    reply = await llm.chat.completions.parse(model="m", messages=ASK, response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(value=4)
    assert "json_schema" not in stage.engine.requests[1]["sampling_params"]


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
    assert reply.choices[0].message.tool_calls is not None
    assert reply.choices[0].finish_reason == "tool_calls"


async def test_a_model_without_calls_of_its_own_refuses_to_be_made_to_call(tmp_path: Path) -> None:
    async with staged(make_model_dir(tmp_path / "tiny"), tool_parser="none") as stage:
        _, llm = await opened(stage)
        for name, value in (("tool_choice", "required"), ("parallel_tool_calls", False)):
            with pytest.raises(openai.BadRequestError, match=name):
                await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS, **{name: value})  # type: ignore[call-overload]
        assert stage.engine.requests == []


async def test_tool_choice_none_reads_no_calls_and_keeps_the_prompt(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say(CALL)
    first = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    history = [*ASK, message.model_dump(exclude_none=True), result]
    stage.say(CALL)
    second = await llm.chat.completions.create(
        model="m", messages=[*history, {"role": "user", "content": "now say it"}], tools=TOOLS,
        tool_choice="none",
    )  # fmt: skip
    assert second.choices[0].message.content == CALL
    await stage.client.finish(access.session_id, reward=0)
    assert (await stage.client.trajectory(access.session_id)).turns[1].branch is None


async def test_the_same_session_seed_gives_the_same_seeds(stage: Stage) -> None:
    for _ in range(2):
        _, llm = await opened(stage, seed=5)
        await llm.chat.completions.create(model="m", messages=ASK, seed=1)
    first, second = stage.engine.requests
    assert first["sampling_params"] == second["sampling_params"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 129}, "n must be at most"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice.*'f'"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort.*none, minimal, low"),
    ({"verbosity": "loud"}, "verbosity.*'low' or 'medium' or 'high'"),
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
    summary = await stage.client.finish(access.session_id)
    assert summary.outcome is Outcome.AGENT_ERROR
    assert f"its {len(REFUSED)} calls were refused, the last one with: messages" in str(summary.error)
    assert "never called" not in str(summary.error)


async def test_neutral_values_are_no_reason_to_refuse(stage: Stage) -> None:
    _, llm = await opened(stage)
    await llm.chat.completions.create(
        model="m", messages=ASK, n=1, response_format={"type": "text"}, logit_bias={}, top_p=1,
        frequency_penalty=0, presence_penalty=0, parallel_tool_calls=True, tool_choice="auto", user="me",
        store=False, metadata={"a": "b"}, logprobs=False, extra_body={"top_k": -1, "min_p": 0},
    )  # fmt: skip
    assert len(stage.engine.requests) == 1


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh"])
async def test_an_effort_and_a_verbosity_are_accepted(stage: Stage, effort: Any) -> None:
    """This template reads neither, so the prompt is the same and the history is continued."""
    access, llm = await opened(stage)
    stage.say("It is 3.")
    first = await llm.chat.completions.create(model="m", messages=ASK)
    history = [*ASK, first.choices[0].message.model_dump(exclude_none=True), ASK[1]]
    await llm.chat.completions.create(model="m", messages=history, reasoning_effort=effort, verbosity="low")
    turns = (await finished(stage, access)).turns
    assert [(turn.parent, turn.branch) for turn in turns] == [(None, None), (0, None)]


@pytest.mark.parametrize("stage", ["named"], indirect=True)
async def test_an_effort_reaches_a_template_that_reads_it(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say("It is 3.")
    first = await llm.chat.completions.create(model="m", messages=ASK, reasoning_effort="low")
    prompt = stage.gateway.renderer.decode(stage.engine.requests[0]["input_ids"])
    assert "Effort: low\n" in prompt
    history = [*ASK, first.choices[0].message.model_dump(exclude_none=True), ASK[1]]
    await llm.chat.completions.create(model="m", messages=history, reasoning_effort="high")
    second = (await finished(stage, access)).turns[1]
    assert str(second.branch).startswith("tools: ")


async def test_evaluation_honours_the_agent_and_training_does_not(stage: Stage) -> None:
    for split, expected in (("train", 1.0), ("eval", 0.25)):
        _, llm = await opened(stage, split=split)
        await llm.chat.completions.create(model="m", messages=ASK, temperature=0.25)
        assert stage.engine.requests[-1]["sampling_params"]["temperature"] == expected


LONG: list[Any] = [{"role": "user", "content": "many words " * 60}]


async def narrow(stage: Stage, context: int) -> None:
    stage.engine.max_context = context
    await stage.client.remove_engine(stage.engine.url)
    await stage.client.add_engine(stage.engine.url)
    await eventually(lambda: stage.gateway.pool.max_context() == context)


async def test_a_prompt_over_the_budget_is_refused_and_never_cut(stage: Stage) -> None:
    await narrow(stage, 64)
    _, llm = await opened(stage)
    with pytest.raises(openai.BadRequestError) as raised:
        await llm.with_options(max_retries=3).chat.completions.create(model="m", messages=LONG)
    assert raised.value.code == "context_length_exceeded"
    assert stage.engine.requests == []
    reply = await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "few"}])
    assert reply.usage is not None
    budget = stage.engine.requests[0]["sampling_params"]["max_new_tokens"]
    assert budget + reply.usage.prompt_tokens == 64


@pytest.mark.parametrize("told", [None, "agent_error"])
async def test_a_history_that_outgrew_the_context_truncates_and_a_first_prompt_does_not(
    stage: Stage, told: str | None
) -> None:
    await narrow(stage, 64)
    access, llm = await opened(stage)
    await llm.chat.completions.create(model="m", messages=ASK)
    with pytest.raises(openai.BadRequestError):
        await llm.chat.completions.create(model="m", messages=LONG)
    summary = await stage.client.finish(access.session_id, outcome=told, reward=0.25)
    assert (summary.outcome, summary.reward) == (Outcome.TRUNCATED, 0.25)
    assert "the model's context is full" in str(summary.error)
    access, llm = await opened(stage)
    with pytest.raises(openai.BadRequestError):
        await llm.chat.completions.create(model="m", messages=LONG)
    summary = await stage.client.finish(access.session_id, outcome=told, reward=0.25)
    assert summary.outcome is Outcome.AGENT_ERROR


async def test_an_agent_that_continues_with_a_shorter_history_completes(stage: Stage) -> None:
    await narrow(stage, 64)
    access, llm = await opened(stage)
    await llm.chat.completions.create(model="m", messages=ASK)
    with pytest.raises(openai.BadRequestError):
        await llm.chat.completions.create(model="m", messages=LONG)
    await llm.chat.completions.create(model="m", messages=ASK)
    assert (await stage.client.finish(access.session_id, reward=1)).outcome is Outcome.COMPLETED
