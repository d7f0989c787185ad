"""A loop on LiteLLM: `completion` (`chat`, `messages`) or `responses`; replies are sent back unchanged."""

from __future__ import annotations

import json
from typing import Any

import litellm
from calculator import MODEL, MOST_TURNS, PARAMETERS
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report

TOOL: Any = {"name": "calculator", "description": "Works out an expression.", "parameters": PARAMETERS}


def completion(history: list[Any]) -> str:
    provider = {"chat": "openai", "messages": "anthropic"}[DIALECT]
    for _ in range(MOST_TURNS):
        tools = [{"type": "function", "function": TOOL}]
        reply: Any = litellm.completion(
            f"{provider}/{MODEL}", messages=history, tools=tools, stream=STREAM, max_tokens=500
        )
        if STREAM:
            reply = litellm.stream_chunk_builder(list(reply), messages=history)
        message = reply.choices[0].message
        history.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = calculator(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit("the model never answered")


def responses(items: list[Any]) -> str:
    for _ in range(MOST_TURNS):
        reply: Any = litellm.responses(
            model=f"openai/{MODEL}", input=items, stream=STREAM,
            tools=[{"type": "function", "strict": False, **TOOL}],
        )  # fmt: skip
        if STREAM:
            reply = [event.response for event in reply if event.type == "response.completed"][-1]
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        wanted = [item for item in reply.output if item.type == "function_call"]
        if not wanted:
            return str(reply.output_text)
        for call in wanted:
            result = calculator(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise SystemExit("the model never answered")


def ask(question: str) -> str:
    history.append({"role": "user", "content": question})
    return responses(history) if DIALECT == "responses" else completion(history)


if __name__ == "__main__":
    history: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    report("litellm", *map(ask, QUESTIONS))
