"""Results of parallel tool calls belong to their calls by id, in whatever order a client sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from tests.fakes import Stage
from tests.integration.gateway.sdk_stage import finished, opened, stage
from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.parsing.reply import call_wire
from tidegate.gateway.rendering.messages import in_call_order
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.sft.chats import read_chats

__all__ = ["stage"]

USER: dict[str, Any] = {"role": "user", "content": "weather in A, B and C?"}


def called(*ids: str) -> dict[str, Any]:
    calls = [call_wire(one, "weather", json.dumps({"at": one})) for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call_id: str, text: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text or f"rain in {call_id}"}


async def test_a_chat_has_one_prompt_for_all_orders(stage: Stage) -> None:
    """modelscope/ms-swift#10174, JustVugg/colibri#118, MiaAI-Lab/Qwen3.8-27B-DFlash2-EXL3-5.0bpw#10"""
    prompts = []
    for order in ("ABC", "CAB", "BCA"):
        access, llm = await opened(stage)
        stage.say("Rain.")
        history: Any = [USER, called("A", "B", "C"), *map(result, order)]
        await llm.chat.completions.create(model="m", messages=history)
        prompts.append(stage.engine.requests[-1]["input_ids"])
        # What is recorded is the history that the model saw.
        assert (await finished(stage, access)).messages[2:5] == [*map(result, "ABC")]
    assert prompts[0] == prompts[1] == prompts[2]


async def test_messages_and_responses_have_one_prompt_for_all_orders(stage: Stage) -> None:
    """can1357/oh-my-pi#11179, router-for-me/CLIProxyAPI#5199, vercel/ai#16578"""
    prompts: dict[str, list[Any]] = {"messages": [], "responses": []}
    for order in ("AB", "BA"):
        access, llm = await opened(stage)
        root = access.base_url.removesuffix("/v1")
        claude = await stage.stack.enter_async_context(AsyncAnthropic(base_url=root, api_key=access.api_key))
        uses: Any = [{"type": "tool_use", "id": one, "name": "weather", "input": {"at": one}} for one in "AB"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": one, "content": f"rain in {one}"} for one in order
        ]
        said: Any = [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
        stage.say("Rain.")
        await claude.messages.create(model="m", max_tokens=9, messages=said)
        prompts["messages"].append(stage.engine.requests[-1]["input_ids"])
        items: Any = [
            {"type": "function_call", "call_id": one, "name": "weather", "arguments": json.dumps({"at": one})}
            for one in "AB"
        ]
        outputs: Any = [
            {"type": "function_call_output", "call_id": one, "output": f"rain in {one}"} for one in order
        ]
        _, llm = await opened(stage)
        stage.say("Rain.")
        await llm.responses.create(model="m", input=[USER, *items, *outputs])
        prompts["responses"].append(stage.engine.requests[-1]["input_ids"])
    for ordered, other in prompts.values():
        assert ordered == other


async def test_outputs_for_a_previous_response_take_the_order_of_its_calls(stage: Stage) -> None:
    """token-js/token.js#36"""
    prompts = []
    call = '<tool_call>\n{"name": "weather", "arguments": {"at": "%s"}}\n</tool_call>'
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    for step in (1, -1):
        _, llm = await opened(stage)
        stage.say(call % "A" + "\n" + call % "B")
        first = await llm.responses.create(model="m", input="weather?", tools=[tool])
        outputs: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": item.arguments}
            for item in first.output
            if item.type == "function_call"
        ]
        stage.say("Rain.")
        await llm.responses.create(
            model="m", input=outputs[::step], previous_response_id=first.id, tools=[tool]
        )
        prompts.append(stage.engine.requests[-1]["input_ids"])
    assert len(outputs) == 2
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("sent", "ordered"),
    [
        # Of several rounds each has its own calls, also where a client repeats the ids.
        (
            [
                USER,
                called("A", "B"),
                result("B"),
                result("A"),
                called("A", "B"),
                result("B", "b"),
                result("A"),
            ],
            [
                USER,
                called("A", "B"),
                result("A"),
                result("B"),
                called("A", "B"),
                result("A"),
                result("B", "b"),
            ],
        ),
        # Messages between the results keep their places, and results without a call.
        (
            [USER, called("A", "B"), result("B"), USER, result("A"), result("Z"), USER],
            [USER, called("A", "B"), result("A"), USER, result("B"), result("Z"), USER],
        ),
        # Of calls with equal ids, each takes one result.
        (
            [USER, called("A", "B", "A"), result("A", "1"), result("A", "2"), result("B")],
            [USER, called("A", "B", "A"), result("A", "1"), result("B"), result("A", "2")],
        ),
        # Not all calls have a result, and one has two.
        (
            [USER, called("A", "B", "C"), result("C"), result("A"), result("A", "again")],
            [USER, called("A", "B", "C"), result("A"), result("C"), result("A", "again")],
        ),
    ],
)
def test_results_exchange_their_places(sent: list[Any], ordered: list[Any]) -> None:
    """modelscope/ms-swift#10174, mnfst/llm-gateway#2858"""
    assert in_call_order(sent) == ordered
    assert in_call_order(ordered) is ordered


def test_demonstrations_have_their_results_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """modelscope/ms-swift#10174, THUDM/slime#2263: the results are one turn, as the template writes them"""
    renderer = Renderer(make_tokenizer("qwen3"))
    rows = []
    for order in ("AB", "BA"):
        messages = [USER, called("A", "B"), *map(result, order), {"role": "assistant", "content": "Rain."}]
        (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
        [demonstration] = read_chats(tmp_path / "chats.jsonl", renderer, "all")
        rows.append([row.ids.tolist() for row in demonstration.rows])
    assert rows[0] == rows[1]
    [[ids]] = rows[:1]
    text = renderer.codec.decode_all(ids)
    assert text.count("<|im_start|>user") == 2  # the question, and both results together
    assert text.index("rain in A") < text.index("rain in B")
