"""An agent on the `anthropic` SDK. Its only argument selects the way of calling."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import anthropic
from anthropic import Anthropic, beta_tool
from calculator import MODEL, MOST_TURNS, PARAMETERS, calculate
from calculator import messages as task_messages
from pydantic import BaseModel

TOOL: Any = {"name": "calculator", "input_schema": PARAMETERS}
MOST_TOKENS = 64
llm = Anthropic(max_retries=0)


class Answer(BaseModel):
    correct: bool
    size: Literal["small", "large"]


def whole(messages: list[Any]) -> dict[str, Any]:
    def ask() -> Any:
        return llm.messages.create(model=MODEL, max_tokens=MOST_TOKENS, messages=messages, tools=[TOOL])

    return _loop(messages, ask)


def stream(messages: list[Any]) -> dict[str, Any]:
    def ask() -> Any:
        with llm.messages.stream(
            model=MODEL, max_tokens=MOST_TOKENS, messages=messages, tools=[TOOL]
        ) as events:
            pieces.append(sum(1 for _ in events.text_stream))
            return events.get_final_message()

    pieces: list[int] = []
    return {**_loop(messages, ask), "pieces": pieces}


def _loop(messages: list[Any], ask: Callable[[], Any]) -> dict[str, Any]:
    calls, counted, billed = [], [], []
    for _ in range(MOST_TURNS):
        counted.append(llm.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL]).input_tokens)
        message = ask()
        billed.append(_billed(message))
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return {"answer": _text(message), "calls": calls, "counted": counted, "billed": billed}
        results = []
        for block in message.content:
            if block.type == "tool_use":
                calls.append([block.name, block.input])
                result = calculate(str(block.input["expression"]))
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        messages.append({"role": "user", "content": results})
    raise SystemExit("the model never answered")


def runner(messages: list[Any]) -> dict[str, Any]:
    """The SDK's own loop."""
    calls: list[Any] = []

    @beta_tool
    def calculator(expression: str) -> str:
        """Works out an expression."""
        calls.append(["calculator", {"expression": expression}])
        return calculate(expression)

    found = list(
        llm.beta.messages.tool_runner(
            model=MODEL, max_tokens=MOST_TOKENS, messages=messages, tools=[calculator]
        )
    )
    billed = [_billed(message) for message in found]
    return {"answer": _text(found[-1]), "calls": calls, "counted": billed, "billed": billed}


def _billed(message: Any) -> int:
    usage = message.usage
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def parse(messages: list[Any]) -> dict[str, Any]:
    message = llm.messages.parse(model=MODEL, max_tokens=400, messages=messages, output_format=Answer)
    assert message.parsed_output is not None
    return {"parsed": message.parsed_output.model_dump()}


if __name__ == "__main__":
    way = {"whole": whole, "stream": stream, "runner": runner, "parse": parse}[sys.argv[1]]
    print(json.dumps({**way(task_messages()), "version": anthropic.__version__}))
