"""A service that answers word problems with a calculator, on the plain openai SDK."""

from __future__ import annotations

import json

from openai import AsyncOpenAI

from tidegate.agents.calculator import calculate

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


async def answer(llm: AsyncOpenAI, question: str) -> tuple[str, str]:
    """Returns the answer, and the id of its reply, to which the user's feedback refers."""
    messages: list = [{"role": "user", "content": question}]
    for _ in range(6):
        reply = await llm.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            content = use(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message.content or "", reply.id


def use(arguments: str) -> str:
    try:
        return calculate(str(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
