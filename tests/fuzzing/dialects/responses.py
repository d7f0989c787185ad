"""OpenAI's Responses."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzzing.dialects.base import PARAMETERS, QUESTIONS, RESULTS, Answer, events

_ENDS = ("response.completed", "response.incomplete")


class Responses:
    name = "responses"
    path = "/responses"

    def question(self, rng: random.Random, history: list[Any]) -> list[Any]:
        calls = []
        for item in reversed(history):
            if not isinstance(item, dict) or item.get("type") != "function_call":
                break
            calls.append(item)
        if calls and rng.random() < 0.8:
            return [
                {
                    "type": "function_call_output",
                    "call_id": item.get("call_id"),
                    "output": rng.choice(RESULTS),
                }
                for item in reversed(calls)
            ]
        text = rng.choice(QUESTIONS)
        content = text if rng.random() < 0.7 else [{"type": "input_text", "text": text}]
        return [{"role": "user", "content": content}]

    def body(self, rng: random.Random, history: list[Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "input": history, "stream": rng.random() < 0.3}
        if rng.random() < 0.4:
            self._continue(body, history)
        if len(history) == 1 and rng.random() < 0.3:
            body["input"] = rng.choice(QUESTIONS)
        if rng.random() < 0.3:
            body["instructions"] = "Be brief."
        if rng.random() < 0.5:
            body["tools"] = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
        if rng.random() < 0.3:
            body["max_output_tokens"] = rng.choice([1, 2, 5, 64])
        return body

    def _continue(self, body: dict[str, Any], history: list[Any]) -> None:
        """Name the last reply instead of sending what was said up to it."""
        for at in range(len(history) - 1, -1, -1):
            item = history[at]
            key = item.get("id") if isinstance(item, dict) else None
            if isinstance(key, str) and key.count("_") == 2:
                body["previous_response_id"] = "resp_" + key.split("_")[1]
                body["input"] = history[at + 1 :]
                return

    def whole(self, payload: Any) -> Answer:
        assert payload["object"] == "response"
        assert payload["status"] in ("completed", "incomplete"), payload
        assert payload["usage"]["output_tokens"] >= 0
        text, calls = "", []
        for item in payload["output"]:
            if item["type"] == "message":
                text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "function_call":
                calls.append((item["name"], item["arguments"]))
        return Answer(payload["id"].removeprefix("resp_")[:32], text, calls, payload["output"])

    def streamed(self, data: bytes) -> Answer | None:
        heard, last = "", None
        for number, event in enumerate(events(data)):
            assert event["sequence_number"] == number, "events are numbered"
            if event["type"] == "response.output_text.delta":
                heard += event["delta"]
            last = event
        if last is None or last["type"] not in _ENDS:
            return None
        answer = self.whole(last["response"])
        assert heard == answer.text, f"{heard!r} was streamed"
        return answer

    def complaint(self, payload: Any) -> str:
        error = payload["error"]
        assert error.keys() == {"message", "type", "param", "code"}, error
        return str(error["message"])
