"""Deeply nested arguments: refused with a clear error in requests, malformed in sampled calls."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.fakes import Stage
from tests.integration.gateway.chat_calls import ASK, TOOLS
from tests.integration.gateway.sdk_stage import finished, opened, stage
from tidegate.service.exact import MAX_LEVELS, too_deep
from tidegate.types import Outcome, Sampling

__all__ = ["stage"]


def arguments(levels: int) -> str:
    """JSON text of an object that is nested so deeply."""
    return '{"x": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


@pytest.mark.parametrize("levels", [2, 3, 99, 100, 101, 252])
def test_levels_of_nesting_are_counted(levels: int) -> None:
    value: Any = json.loads(arguments(levels))
    assert too_deep(value, levels - 1)
    assert not too_deep(value, levels)
    assert not too_deep(1, 0)


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 251, 252, 253, 900])
async def test_deep_arguments_in_a_message_are_refused_by_name(stage: Stage, levels: int) -> None:
    _, llm = await opened(stage)
    function = {"name": "calculator", "arguments": arguments(levels)}
    said = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    history: list[Any] = [*ASK, said, {"role": "tool", "tool_call_id": "c", "content": "3"}]
    with pytest.raises(openai.BadRequestError, match="'calculator' are nested more than 100 levels") as told:
        await llm.chat.completions.create(model="m", messages=history, tools=TOOLS)
    assert told.value.param == "messages"


@pytest.mark.parametrize("levels", [MAX_LEVELS, MAX_LEVELS + 1, 251, 252, 253])
async def test_a_deep_call_that_is_sampled_is_data(stage: Stage, levels: int) -> None:
    """The policy wrote it: a call, or malformed text, that can be quoted; no failure of the gateway."""
    access, llm = await opened(stage, sampling=Sampling(max_tokens=3000))
    call = f'<tool_call>\n{{"name": "calculator", "arguments": {arguments(levels)}}}\n</tool_call>'
    stage.say(call)
    stage.say("well")
    options: Any = {"model": "m", "tools": TOOLS, "max_tokens": 3000}
    reply = (await llm.chat.completions.create(messages=ASK, **options)).choices[0].message
    deep = levels > MAX_LEVELS
    assert (reply.content == call) if deep else (reply.tool_calls is not None)
    answer = (
        {"role": "user", "content": "so?"}
        if reply.tool_calls is None
        else {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}
    )
    history: list[Any] = [*ASK, reply.model_dump(exclude_none=True), answer]
    await llm.chat.completions.create(messages=history, **options)
    record = await finished(stage, access)
    assert record.outcome is Outcome.COMPLETED
    assert [turn.parse for turn in record.turns] == ["malformed" if deep else "ok", None]
    assert [turn.parent for turn in record.turns] == [None, 0]


async def test_the_deepest_call_can_be_sent_back_in_every_dialect(stage: Stage) -> None:
    access, _ = await opened(stage, sampling=Sampling(max_tokens=3000))
    call = f'<tool_call>\n{{"name": "calculator", "arguments": {arguments(MAX_LEVELS)}}}\n</tool_call>'
    stage.say(call)
    stage.say("well")
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(
        base_url=access.base_url.removesuffix("/v1"), api_key=access.api_key, max_retries=0
    ) as claude:
        tools: Any = [{"name": "calculator", "input_schema": {"type": "object"}}]
        ask: Any = [{"role": "user", "content": "1+2?"}]
        reply = await claude.messages.create(model="m", max_tokens=3000, messages=ask, tools=tools)
        [block] = reply.content
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        said = {"role": "assistant", "content": [block.model_dump(exclude_none=True)]}
        history: Any = [*ask, said, {"role": "user", "content": [result]}]
        again = await claude.messages.create(model="m", max_tokens=3000, messages=history, tools=tools)
    assert again.content[0].text == "well"
    assert [turn.parent for turn in (await finished(stage, access)).turns] == [None, 0]
