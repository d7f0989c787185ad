"""Integers beyond 64 bits, and NaN, pass unchanged or are refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.environments import TASK, LocalEnvironments
from tests.fakes import Stage, staged
from tests.integration.envs.test_service import service
from tests.integration.gateway.sdk_stage import finished, opened, stage
from tests.integration.gateway.test_environments import call, session_of, tool_call_text
from tests.integration.gateway.test_mcp import connected
from tests.tiny_tokenizer import make_model_dir, make_tokenizer
from tidegate.envs.base import Environment
from tidegate.envs.tools import text_of, tool
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.parsing.reply import SampledCall
from tidegate.gateway.parsing.tool_calls.registry import FORMATS
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.service import exact
from tidegate.sft.chats import read_chats
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.trajectories import TrajectoryFiles, decode_trajectory, read_lines
from tidegate.types import Task, Trajectory

__all__ = ["stage"]

BIG = 123456789012345678901
NUMBERS = [2**53 + 1, 2**64 - 1, 2**64, -(2**63) - 1, BIG, -(10**60)]
ASK: list[Any] = [{"role": "user", "content": "pay"}]
SCHEMA = {"type": "object", "properties": {"amount": {"type": "integer", "maximum": BIG}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "pay", "parameters": SCHEMA}}]


async def post(access: SessionAccess, path: str, body: Any) -> dict[str, Any]:
    """Returns the parsed response, by Python's json, which keeps integers."""
    headers = {"authorization": f"Bearer {access.api_key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(access.base_url + path, data=json.dumps(body)) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_sampled_argument_reaches_the_client(stage: Stage, number: int) -> None:
    """google/adk-python#3592, vllm-project/vllm#55743: in each dialect, whole and streamed, and sent back"""
    access, llm = await opened(stage)
    sampled = tool_call_text("pay", amount=number)
    stage.say(sampled)
    reply = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    message = reply.choices[0].message
    [made] = message.tool_calls or []
    assert made.type == "function"
    assert json.loads(made.function.arguments) == {"amount": number}

    stage.say("paid")
    result: Any = {"role": "tool", "tool_call_id": made.id, "content": "ok"}
    sent: Any = [*ASK, message.model_dump(exclude_none=True), result]
    await llm.chat.completions.create(model="m", messages=sent, tools=TOOLS)
    # A history that was not recorded is rendered with the number as well.
    stage.say("paid")
    foreign: Any = [{"role": "user", "content": "now"}, *sent[1:]]
    await llm.chat.completions.create(model="m", messages=foreign, tools=TOOLS)
    assert str(number) in stage.gateway.renderer.decode(stage.engine.requests[-1]["input_ids"])

    stage.say(sampled)
    tool_use: Any = {"name": "pay", "input_schema": SCHEMA}
    claude = {
        "model": "m",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "b"}],
        "tools": [tool_use],
    }
    answer = await post(access, "/messages", claude)
    assert answer["content"][0]["input"] == {"amount": number}
    stage.say("paid")
    returned = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "ok"}
    reply_and_result = [("assistant", answer["content"]), ("user", [returned])]
    claude["messages"] += [*({"role": role, "content": content} for role, content in reply_and_result)]
    await post(access, "/messages", claude)

    stage.say(sampled)
    asked = {"model": "m", "input": "c", "tools": [{"type": "function", "name": "pay", "parameters": SCHEMA}]}
    answer = await post(access, "/responses", asked)
    assert json.loads(answer["output"][0]["arguments"]) == {"amount": number}
    assert answer["tools"][0]["parameters"] == SCHEMA, "the response repeats the request's tools"

    turns = (await finished(stage, access)).turns
    assert [turn.parse for turn in turns if turn.parse] == ["ok"] * 3
    assert [(turn.parent, turn.branch) for turn in (turns[1], turns[4])] == [(0, None), (3, None)]


async def test_choices_that_differ_in_the_last_digit(stage: Stage) -> None:
    """NousResearch/hermes-agent#55314: as floats both are the same, and one would continue the other"""
    access, llm = await opened(stage)
    for number in (2**53 + 1, 2**53):
        stage.say(tool_call_text("pay", amount=number))
    reply = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS, n=2)
    for choice in reply.choices:
        message: Any = choice.message.model_dump(exclude_none=True)
        [made] = message["tool_calls"]
        stage.say("paid")
        result: Any = {"role": "tool", "tool_call_id": made["id"], "content": "ok"}
        await llm.chat.completions.create(model="m", messages=[*ASK, message, result], tools=TOOLS)
        prompt = stage.gateway.renderer.decode(stage.engine.requests[-1]["input_ids"])
        assert str(json.loads(made["function"]["arguments"])["amount"]) in prompt
    assert [turn.parent for turn in (await finished(stage, access)).turns] == [None, None, 0, 1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("number", NUMBERS)
def test_each_format_reads_it(name: str, number: int) -> None:
    """vllm-project/vllm#55743, NousResearch/hermes-agent#55315 and #40763"""
    from tests.unit.gateway.test_tool_call_formats import write

    parser = FORMATS[name].parser(TOOLS)
    parts = [*parser.feed(write(name, [("pay", {"amount": number})])), *parser.finish()]
    [made] = [part for part in parts if isinstance(part, SampledCall)]
    assert json.loads(made.arguments) == {"amount": number}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "kimi_k2", "mistral"])
def test_a_number_that_json_lacks_is_no_call(name: str, number: str) -> None:
    """ml-explore/mlx-lm#1617, PrefectHQ/fastmcp#5150"""
    from tests.unit.gateway.test_tool_call_formats import write

    parser = FORMATS[name].parser(TOOLS)
    text = write(name, [("pay", {"amount": "?"})]).replace('"?"', number)
    parts = [*parser.feed(text), *parser.finish()]
    assert (parser.status, any(isinstance(part, SampledCall) for part in parts)) == ("malformed", False)


class Bank(Environment):
    """Repeats the amounts that it gets."""

    name = "bank"

    def train_task(self, index: int) -> Task:
        return TASK

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": []}

    async def setup(self, task: Task) -> dict[str, Any]:
        return {}

    @tool
    async def pay(self, amount: int) -> dict[str, Any]:
        """Pays."""
        return {"paid": amount}

    @tool
    async def mean(self) -> dict[str, Any]:
        """Averages nothing."""
        return {"mean": float("nan")}


MONEY = Task("t", "bank", ASK)


@asynccontextmanager
async def bank(tmp_path: Path, **options: Any) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny", "qwen3")
    options = {"environments": LocalEnvironments(Bank()), **options}
    async with staged(model, **options) as made:
        yield made


async def test_a_tool_gets_and_returns_it(tmp_path: Path) -> None:
    """google/adk-python#3592, ijl/orjson#301, vertexproject/synapse#3776: by HTTP and MCP, and restored"""
    async with bank(tmp_path, journal=tmp_path / "journal") as made:
        access, _ = await opened(made, task=MONEY)
        session = session_of(access)
        for number in NUMBERS:
            assert json.loads((await session.call(call("pay", amount=number)))["content"]) == {"paid": number}
        async with connected(session) as client:
            for number in NUMBERS:
                result = await client.call_tool("pay", {"amount": number})
                assert json.loads(result.content[0].text) == {"paid": number}
        recorded = [one.arguments["amount"] for one in (await finished(made, access)).tool_calls]
        assert recorded == NUMBERS * 2
    async with bank(tmp_path, journal=tmp_path / "journal") as made:
        restored = (await made.client.trajectory(access.session_id)).tool_calls
        assert [one.arguments["amount"] for one in restored] == NUMBERS * 2


async def test_a_worker_process_gets_it() -> None:
    """vertexproject/synapse#3776: the service's messages are MessagePack, which has no such integers"""
    async with service("Counter", workers=1) as env:
        await env.setup("e", Task("t", "counter", [], info={"n": BIG}), 60.0)
        assert (await env.call_tool("e", "add", {"number": BIG})).content == str(BIG)


async def test_nan_is_never_null(tmp_path: Path) -> None:
    """PrefectHQ/fastmcp#5150, modelcontextprotocol/python-sdk#3429: results show it, arguments are refused"""
    assert text_of({"a": [float("nan"), float("-inf")], "b": BIG}) == f'{{"a":[NaN,-Infinity],"b":{BIG}}}'
    async with bank(tmp_path) as made:
        access, _ = await opened(made, task=MONEY)
        session = session_of(access)
        assert (await session.call(call("mean")))["content"] == '{"mean":NaN}'
        async with connected(session) as client:
            assert (await client.call_tool("mean", {})).content[0].text == '{"mean":NaN}'
        accepted = "application/json, text/event-stream"
        headers = {"authorization": f"Bearer {access.api_key}", "accept": accepted}
        asked = {"name": "pay", "arguments": {"amount": float("nan")}}
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": asked}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(session.mcp_url, json=rpc) as response:
                assert "the arguments of 'pay' cannot be recorded" in await response.text()
            async with http.post(f"{session.url}/tools/pay", json=asked["arguments"]) as response:
                assert "the body is not JSON" in await response.text()


async def test_parameters_with_it_are_refused_by_name(stage: Stage) -> None:
    """PrefectHQ/prefect#15031: an integer that is too large must be a refusal, not a failure of the server"""
    access, _ = await opened(stage)
    for name in ("seed", "top_k", "max_tokens", "temperature", "n"):
        with pytest.raises(AssertionError, match=f"{name} must be a number of at most 64 bits"):
            await post(access, "/chat/completions", {"model": "m", "messages": ASK, name: BIG})


async def test_a_record_keeps_it(stage: Stage, tmp_path: Path) -> None:
    """ijl/orjson#301, aleph-im/pyaleph#610: metadata and messages in the journal, on the wire, in files"""
    access, llm = await opened(stage, metadata={"n": BIG})
    stage.say("a")
    odd: Any = [{"role": "user", "content": "a", "n": BIG}]
    await llm.chat.completions.create(model="m", messages=odd)
    trajectory = await finished(stage, access)
    assert (trajectory.metadata["n"], trajectory.messages[0]["n"]) == (BIG, BIG)
    TrajectoryFiles(tmp_path).append([trajectory], State.FAILED)
    [line] = read_lines(tmp_path / "trajectories" / "failed.jsonl")
    restored: Trajectory = decode_trajectory(line)
    assert (restored.metadata["n"], restored.messages[0]["n"]) == (BIG, BIG)


def test_a_demonstration_keeps_it(tmp_path: Path) -> None:
    """NousResearch/hermes-agent#55314"""
    renderer = Renderer(make_tokenizer("qwen3"))
    function = {"name": "pay", "arguments": json.dumps({"amount": BIG})}
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [*ASK, reply], "tools": TOOLS}))
    [demonstration] = read_chats(tmp_path / "chats.jsonl", renderer, "all")
    [row] = demonstration.rows
    assert str(BIG) in renderer.codec.decode_all(row.ids[row.mask].tolist())


def test_values_survive_json_and_messagepack() -> None:
    """vertexproject/synapse#3776, msgpack/msgpack-python#221"""
    value = {"a": [*NUMBERS, 1.5, None, True, "é"], "b": {"c": {"d": NUMBERS}}, "e": b"\x00"}
    assert exact.unpack(exact.pack(value)) == value
    del value["e"]
    assert exact.loads(exact.dumps(value)) == value
