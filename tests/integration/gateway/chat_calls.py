"""Chat Completions by the real `openai` SDK, whole and streamed: the same message."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

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
ASK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]


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
