"""Tool calls in the formats of several model families, streamed by the gateway and sent back to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fakes import staged
from tests.families import family_tokenizer
from tidegate.types import Task

ASK: list[Any] = [{"role": "user", "content": "2+1?"}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
CALLS = {
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"x": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral_v7": '[TOOL_CALLS]add[ARGS]{"x": 3}',
}


@pytest.mark.parametrize(("family", "call"), CALLS.items())
async def test_streamed_calls_come_back_as_the_recorded_turn(tmp_path: Path, family: str, call: str) -> None:
    family_tokenizer(family, "tiny").save_pretrained(str(tmp_path / family))
    async with staged(tmp_path / family) as stage:
        access = await stage.client.open_session(task=Task("t", "sums", ASK), deadline_s=20.0)
        llm = await stage.llm(access)
        sampled = stage.say("Let me see." + call)
        async with llm.chat.completions.stream(model="m", messages=ASK, tools=TOOLS) as stream:
            reply = (await stream.get_final_completion()).choices[0].message
        assert reply.content == "Let me see."
        assert reply.tool_calls is not None
        [made] = reply.tool_calls
        assert (made.function.name, orjson.loads(made.function.arguments)) == ("add", {"x": 3})

        past: Any = reply.model_dump(exclude_none=True, exclude={"parsed"})
        sent = [*ASK, past, {"role": "tool", "tool_call_id": made.id, "content": "4"}]
        await llm.chat.completions.create(model="m", messages=sent, tools=TOOLS)
        first, second = (request["input_ids"] for request in stage.engine.requests)
        assert second[: len(first) + len(sampled)] == first + sampled
        await stage.client.finish(access.session_id, reward=0)
        one, other = (await stage.client.trajectory(access.session_id)).turns
        assert (one.parse, other.parent, other.branch) == ("ok", 0, None)
