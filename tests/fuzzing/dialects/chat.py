"""Chat Completions."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzzing.dialects.base import PARAMETERS, QUESTIONS, RESULTS, Answer, events


class Chat:
    name = "chat"
    path = "/chat/completions"

    def question(self, rng: random.Random, history: list[Any]) -> list[Any]:
        last = history[-1] if history else None
        calls = last.get("tool_calls") if isinstance(last, dict) else None
        if isinstance(calls, list) and calls and rng.random() < 0.8:
            return [
                {"role": "tool", "tool_call_id": call.get("id"), "content": rng.choice(RESULTS)}
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
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
        if rng.random() < 0.3:
            body["max_tokens"] = rng.choice([1, 2, 5, 64])
        if rng.random() < 0.1:
            body["stop"] = rng.choice(["e", ["\n", "</"], "zz"])
        if rng.random() < 0.1:
            body["logprobs"] = True
        if rng.random() < 0.05:
            body["n"] = rng.choice([2, 3])
        if "tools" in body and rng.random() < 0.1:
            body["tool_choice"] = rng.choice(["none", "required"])
        if body["stream"] and rng.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
        return body

    def whole(self, payload: Any) -> Answer:
        choice = payload["choices"][0]
        assert choice["finish_reason"] in ("stop", "length", "tool_calls"), choice
        assert payload["usage"]["completion_tokens"] >= 0
        return self._answer(payload["id"], choice["message"], len(payload["choices"]))

    def streamed(self, data: bytes) -> Answer | None:
        if not data.endswith(b"data: [DONE]\n\n"):
            return None
        key, text, finish = "", "", None
        calls: list[Any] = []
        indexes = set()
        for chunk in events(data):
            key = chunk["id"]
            for choice in chunk["choices"]:
                indexes.add(choice["index"])
                if choice["index"] != 0:
                    continue
                text += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls", ()):
                    if "id" in piece:
                        calls.append(piece)
                    else:
                        calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
                finish = choice["finish_reason"] or finish
        assert finish in ("stop", "length", "tool_calls"), data
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return self._answer(key, {**message, "tool_calls": calls} if calls else message, len(indexes))

    def _answer(self, key: str, message: dict[str, Any], choices: int) -> Answer:
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        return Answer(key.removeprefix("chatcmpl-"), message["content"] or "", calls, [message], choices - 1)

    def complaint(self, payload: Any) -> str:
        error = payload["error"]
        assert error.keys() == {"message", "type", "param", "code"}, error
        return str(error["message"])
