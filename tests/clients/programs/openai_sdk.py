"""An agent on the `openai` SDK, versions 2.x and 3.x. Its only argument selects the way of calling."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from calculator import MODEL, MOST_TURNS, PARAMETERS, calculate
from calculator import messages as task_messages
from openai import OpenAI
from pydantic import BaseModel

CHAT_TOOL: Any = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}
RESPONSES_TOOL: Any = {"type": "function", "name": "calculator", "parameters": PARAMETERS, "strict": False}
llm = OpenAI(max_retries=0)


class Answer(BaseModel):
    correct: bool
    size: Literal["small", "large"]


def chat(messages: list[Any]) -> dict[str, Any]:
    def ask() -> Any:
        reply = llm.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
        return reply.choices[0].message

    return _chat_loop(messages, ask)


def chat_stream(messages: list[Any]) -> dict[str, Any]:
    def ask() -> Any:
        with llm.chat.completions.stream(model=MODEL, messages=messages, tools=[CHAT_TOOL]) as stream:
            pieces.append(sum(event.type == "content.delta" for event in stream))
            return stream.get_final_completion().choices[0].message

    pieces: list[int] = []
    return {**_chat_loop(messages, ask), "pieces": pieces}


def _chat_loop(messages: list[Any], ask: Callable[[], Any]) -> dict[str, Any]:
    calls = []
    for _ in range(MOST_TURNS):
        message = ask()
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return {"answer": message.content, "calls": calls}
        for call in message.tool_calls:
            calls.append([call.function.name, json.loads(call.function.arguments)])
            result = calculate(calls[-1][1]["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit("the model never answered")


def responses(messages: list[Any]) -> dict[str, Any]:
    """The history is the client's: every item goes back as it came."""
    items = list(messages)

    def ask() -> Any:
        return llm.responses.create(model=MODEL, input=items, tools=[RESPONSES_TOOL], store=False)

    return _responses_loop(items, ask)


def responses_stream(messages: list[Any]) -> dict[str, Any]:
    items = list(messages)

    def ask() -> Any:
        with llm.responses.stream(model=MODEL, input=items, tools=[RESPONSES_TOOL]) as stream:
            pieces.append(sum(event.type == "response.output_text.delta" for event in stream))
            return stream.get_final_response()

    pieces: list[int] = []
    return {**_responses_loop(items, ask), "pieces": pieces}


def responses_previous(messages: list[Any]) -> dict[str, Any]:
    """The history is the server's: only what is new is sent."""
    items, earlier = list(messages), None

    def ask() -> Any:
        nonlocal earlier
        response = llm.responses.create(
            model=MODEL, input=items, tools=[RESPONSES_TOOL], previous_response_id=earlier
        )
        items.clear()
        earlier = response.id
        return response

    return _responses_loop(items, ask, server_side=True)


def _responses_loop(items: list[Any], ask: Callable[[], Any], server_side: bool = False) -> dict[str, Any]:
    calls = []
    for _ in range(MOST_TURNS):
        response = ask()
        if not server_side:
            items += [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
            ]
        wanted = [item for item in response.output if item.type == "function_call"]
        if not wanted:
            return {"answer": response.output_text, "calls": calls}
        for call in wanted:
            calls.append([call.name, json.loads(call.arguments)])
            result = calculate(calls[-1][1]["expression"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise SystemExit("the model never answered")


def chat_parse(messages: list[Any]) -> dict[str, Any]:
    reply = llm.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer)
    parsed = reply.choices[0].message.parsed
    assert parsed is not None
    return {"parsed": parsed.model_dump()}


def responses_parse(messages: list[Any]) -> dict[str, Any]:
    parsed = llm.responses.parse(model=MODEL, input=messages, text_format=Answer).output_parsed
    assert parsed is not None
    return {"parsed": parsed.model_dump()}


def refused(messages: list[Any]) -> dict[str, Any]:
    """What cannot be honoured comes back as the SDK's own exception, and is not sent again."""
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    try:
        llm.with_options(max_retries=3).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}]
        )
    except openai.BadRequestError as error:
        return {"code": error.code, "message": error.message}
    raise SystemExit("an image was accepted")


if __name__ == "__main__":
    way = {
        "chat": chat, "chat-stream": chat_stream, "chat-parse": chat_parse,
        "responses": responses, "responses-stream": responses_stream, "responses-parse": responses_parse,
        "responses-previous": responses_previous, "refused": refused,
    }[sys.argv[1]]  # fmt: skip
    print(json.dumps({**way(task_messages()), "version": openai.__version__}))
