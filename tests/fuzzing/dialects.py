"""What a well-meaning client says in each dialect, and what it reads in an answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Protocol

TOOL = {"type": "object", "properties": {"x": {"type": "integer"}}}
QUESTIONS = [
    "?",
    "What is 2 + 2?",
    "  spaced  ",
    "line\nbreak",
    "é🍎",
    "<tool_call>{}</tool_call>",
    "a" * 300,
]


@dataclass(slots=True)
class Answer:
    """A reply as the client understood it."""

    id: str
    """The gateway's own id of the turn, without the dialect's prefix."""
    text: str
    calls: list[tuple[str, str]]
    """Name and arguments of each tool call."""
    items: list[Any]
    """What the client puts into its history for it."""


class Dialect(Protocol):
    name: str
    path: str

    def question(self, rng: random.Random, history: list[Any]) -> list[Any]:
        """What the client says next, in items of the history."""
        ...

    def body(self, rng: random.Random, history: list[Any]) -> dict[str, Any]: ...

    def whole(self, payload: Any) -> Answer: ...

    def streamed(self, data: bytes) -> Answer | None:
        """What the events add up to; None where they don't end as they should."""
        ...

    def complaint(self, payload: Any) -> str:
        """The message of an error; raises where it does not have the dialect's shape."""
        ...


class Chat:
    """Chat Completions."""

    name = "chat"
    path = "/chat/completions"

    def question(self, rng: random.Random, history: list[Any]) -> list[Any]:
        last = history[-1] if history else None
        calls = last.get("tool_calls") if isinstance(last, dict) else None
        if isinstance(calls, list) and calls and rng.random() < 0.8:
            return [
                {"role": "tool", "tool_call_id": call.get("id"), "content": rng.choice(["42", "", "error"])}
                for call in calls
                if isinstance(call, dict)
            ]
        said: dict[str, Any] = {"role": "user", "content": rng.choice(QUESTIONS)}
        if rng.random() < 0.1:
            said["content"] = [{"type": "text", "text": said["content"]}]
        opening = not history and rng.random() < 0.5
        return (
            [{"role": rng.choice(["system", "developer"]), "content": "Be brief."}, said]
            if opening
            else [said]
        )

    def body(self, rng: random.Random, history: list[Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "messages": history, "stream": rng.random() < 0.3}
        if rng.random() < 0.5:
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]
        if rng.random() < 0.3:
            body["max_tokens"] = rng.choice([1, 2, 5, 64])
        if rng.random() < 0.1:
            body["stop"] = rng.choice(["e", ["\n", "</"], "zz"])
        if rng.random() < 0.1 and not body["stream"]:
            body["logprobs"] = True
        if body["stream"] and rng.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
        return body

    def whole(self, payload: Any) -> Answer:
        choice = payload["choices"][0]
        assert choice["finish_reason"] in ("stop", "length", "tool_calls"), choice
        assert payload["usage"]["completion_tokens"] >= 0
        return self._answer(payload["id"], choice["message"])

    def streamed(self, data: bytes) -> Answer | None:
        events = data.split(b"\n\n")
        if events[-2:] != [b"data: [DONE]", b""]:
            return None
        key, text, finish = "", "", None
        calls: list[Any] = []
        for event in events[:-2]:
            chunk = json.loads(event.removeprefix(b"data: "))
            key = chunk["id"]
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls", ()):
                    if "id" in piece:
                        calls.append(piece)
                    else:
                        calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
                finish = choice["finish_reason"] or finish
        assert finish in ("stop", "length", "tool_calls"), data
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return self._answer(key, {**message, "tool_calls": calls} if calls else message)

    def _answer(self, key: str, message: dict[str, Any]) -> Answer:
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        return Answer(key.removeprefix("chatcmpl-"), message["content"] or "", calls, [message])

    def complaint(self, payload: Any) -> str:
        error = payload["error"]
        assert error.keys() == {"message", "type", "param", "code"}, error
        return str(error["message"])


DIALECTS: dict[str, Dialect] = {one.name: one for one in (Chat(),)}
