"""Anthropic's Messages."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.fuzzing.dialects.base import PARAMETERS, QUESTIONS, RESULTS, Answer, events

_STOPS = ("end_turn", "max_tokens", "tool_use", "stop_sequence")


class Messages:
    name = "messages"
    path = "/messages"

    def question(self, rng: random.Random, history: list[Any]) -> list[Any]:
        last = history[-1] if history else None
        content = last.get("content") if isinstance(last, dict) else None
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        calls = [block for block in blocks if block.get("type") == "tool_use"]
        if calls and rng.random() < 0.8:
            results = [
                {"type": "tool_result", "tool_use_id": call.get("id"), "content": rng.choice(RESULTS)}
                for call in calls
            ]
            return [{"role": "user", "content": results}]
        text = rng.choice(QUESTIONS)
        return [{"role": "user", "content": text if rng.random() < 0.8 else [{"type": "text", "text": text}]}]

    def body(self, rng: random.Random, history: list[Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "messages": history, "stream": rng.random() < 0.3}
        body["max_tokens"] = rng.choice([1, 2, 5, 64, 64])
        if rng.random() < 0.3:
            body["system"] = rng.choice(["Be brief.", [{"type": "text", "text": "Be brief."}]])
        if rng.random() < 0.5:
            body["tools"] = [{"name": "f", "input_schema": PARAMETERS}]
        if rng.random() < 0.1:
            body["stop_sequences"] = rng.choice([["e"], ["\n", "</"]])
        if rng.random() < 0.1:
            body["thinking"] = {"type": rng.choice(["enabled", "disabled"]), "budget_tokens": 1024}
        return body

    def whole(self, payload: Any) -> Answer:
        assert payload["type"] == "message"
        assert payload["stop_reason"] in _STOPS, payload
        assert payload["usage"]["output_tokens"] >= 0
        content = payload["content"]
        text = "".join(block["text"] for block in content if block["type"] == "text")
        calls = [
            (block["name"], json.dumps(block["input"])) for block in content if block["type"] == "tool_use"
        ]
        said = [{"role": "assistant", "content": content}] if content else []
        return Answer(payload["id"].removeprefix("msg_"), text, calls, said)

    def streamed(self, data: bytes) -> Answer | None:
        message: dict[str, Any] = {}
        blocks: list[Any] = []
        kind = None
        for event in events(data):
            kind = event["type"]
            if kind == "message_start":
                message = event["message"]
            elif kind == "content_block_start":
                assert event["index"] == len(blocks), "blocks come in order"
                blocks.append({**event["content_block"], "partial": ""})
            elif kind == "content_block_delta":
                delta = event["delta"]
                for name in ("text", "thinking", "partial_json"):
                    if name in delta:
                        held = "partial" if name == "partial_json" else name
                        blocks[event["index"]][held] += delta[name]
            elif kind == "message_delta":
                message = {**message, **event["delta"], "usage": event["usage"]}
        if kind != "message_stop":
            return None
        for block in blocks:
            partial = block.pop("partial")
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial)
        return self.whole({**message, "content": blocks})

    def complaint(self, payload: Any) -> str:
        assert payload["type"] == "error", payload
        assert isinstance(payload["error"]["type"], str)
        return str(payload["error"]["message"])
