"""Histories in which a tool call has no result are refused by name, as the APIs of OpenAI and Anthropic do.

Agents leave such calls behind after an interruption. A template would write them as they are, and a model
reads the next message in place of the result.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.fakes import Stage
from tests.integration.gateway.sdk_stage import finished, opened, stage
from tests.reports.test_order_of_tool_results import USER, called, result
from tidegate.gateway.rendering.messages import unanswered_calls

__all__ = ["stage"]

GO_ON: dict[str, Any] = {"role": "user", "content": "go on"}


async def test_a_chat_is_refused_with_the_ids(stage: Stage) -> None:
    """tidyverse/ellmer#459, HKUDS/OpenHarness#240, EvoScientist/EvoScientist#360: the words of OpenAI, by
    which frameworks repair a history"""
    access, llm = await opened(stage)
    history: Any = [USER, called("A", "B", "C"), result("B"), GO_ON]
    with pytest.raises(
        openai.BadRequestError, match="The following tool_call_ids did not have response messages: A, C"
    ) as refused:
        await llm.chat.completions.create(model="m", messages=history)
    assert refused.value.param == "messages"
    stage.say("Rain.")
    history[3:3] = [result("A", "interrupted"), result("C", "interrupted")]
    await llm.chat.completions.create(model="m", messages=history)
    # What was refused is no turn.
    assert len((await finished(stage, access)).turns) == 1


async def test_messages_are_refused_with_the_ids(stage: Stage) -> None:
    """anomalyco/opencode#3230, anomalyco/opencode#5750, ravitemer/codecompanion-history.nvim#39"""
    access, _ = await opened(stage)
    root = access.base_url.removesuffix("/v1")
    claude = await stage.stack.enter_async_context(AsyncAnthropic(base_url=root, api_key=access.api_key))
    uses: Any = [{"type": "tool_use", "id": one, "name": "weather", "input": {}} for one in "AB"]
    results: Any = [{"type": "tool_result", "tool_use_id": "B", "content": "rain"}]
    said: Any = [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    with pytest.raises(anthropic.BadRequestError, match="without `tool_result` blocks after them: A"):
        await claude.messages.create(model="m", max_tokens=9, messages=said)
    with pytest.raises(anthropic.BadRequestError, match="without `tool_result` blocks after them: A"):
        await claude.messages.count_tokens(model="m", messages=said)


async def test_responses_are_refused_with_the_ids(stage: Stage) -> None:
    """livekit/agents#5092, frontman-ai/frontman#1592: also calls of the previous response"""
    _, llm = await opened(stage)
    items: Any = [
        {"type": "function_call", "call_id": one, "name": "weather", "arguments": "{}"} for one in "AB"
    ]
    output: Any = {"type": "function_call_output", "call_id": "B", "output": "rain"}
    with pytest.raises(openai.BadRequestError, match="no tool output found for these function calls: A"):
        await llm.responses.create(model="m", input=[USER, *items, output, GO_ON])
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    stage.say("<tool_call>\n" + json.dumps({"name": "weather", "arguments": {}}) + "\n</tool_call>")
    first = await llm.responses.create(model="m", input="weather?", tools=[tool])
    [call] = [item for item in first.output if item.type == "function_call"]
    with pytest.raises(openai.BadRequestError, match=f"these function calls: {call.call_id}"):
        await llm.responses.create(model="m", input="go on", previous_response_id=first.id, tools=[tool])


SPLIT = [called("A"), called("B"), result("A"), result("B")]


@pytest.mark.parametrize(
    ("messages", "missing"),
    [
        ([USER, called("A", "B"), result("B"), result("A"), GO_ON], []),
        ([USER, called("A")], ["A"]),
        ([USER, called("A"), called("B"), GO_ON], ["A", "B"]),
        # Parallel calls that a client sends as several messages; messages between the results.
        ([USER, *SPLIT], []),
        ([USER, called("A", "B"), result("A"), GO_ON, result("B")], []),
        # A result that comes after the next reply, or twice, answers no other call.
        ([USER, called("A"), GO_ON, {"role": "assistant", "content": "?"}, result("A")], ["A"]),
        ([USER, called("A", "B"), result("A"), result("A")], ["B"]),
        # Each round has its own calls, also where ids repeat; of equal ids each needs a result.
        ([USER, called("A"), result("A"), called("A")], ["A"]),
        ([USER, called("A", "A"), result("A")], ["A"]),
        # Results without an id have the order of the calls.
        ([USER, called("A", "B"), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}], []),
        # Results without a call, and what is no message, are not judged here.
        ([USER, result("Z"), 7, {"role": "assistant", "tool_calls": "x"}], []),
    ],
)
def test_calls_without_a_result(messages: list[Any], missing: list[str]) -> None:
    """langchain-ai/deepagentsjs#150, dograh-hq/dograh#511, agentscope-ai/agentscope-java#2410"""
    assert unanswered_calls(messages) == missing
