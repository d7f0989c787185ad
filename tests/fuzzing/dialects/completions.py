"""Completions: the history is parts of one text, or of one list of ids."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzzing.dialects.base import QUESTIONS, Answer, events


class Completions:
    name = "completions"
    path = "/completions"

    def question(self, rng: random.Random, history: list[Any]) -> list[Any]:
        return [rng.choice(QUESTIONS)]

    def body(self, rng: random.Random, history: list[Any]) -> dict[str, Any]:
        text = "".join(map(_text, history))
        body: dict[str, Any] = {"model": "m", "prompt": text, "stream": rng.random() < 0.3}
        if rng.random() < 0.2:
            ids = [rng.randrange(32, 250) for _ in range(rng.randint(1, 9))]
            body["prompt"] = rng.choice([ids, [ids, ids[:1]], [text, ids], [text, "other"], [text]])
        if rng.random() < 0.5:
            body["max_tokens"] = rng.choice([1, 2, 5, 64])
        if rng.random() < 0.1:
            body["stop"] = rng.choice(["e", ["\n", "</"], "zz"])
        if rng.random() < 0.1:
            body["logprobs"] = 0
        if rng.random() < 0.05:
            body["n"] = rng.choice([2, 3])
        if body["stream"] and rng.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
        return body

    def whole(self, payload: Any) -> Answer:
        assert payload["object"] == "text_completion"
        assert payload["usage"]["completion_tokens"] >= 0
        choices = payload["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        for choice in choices:
            self._check(choice)
        return self._answer(payload["id"], choices[0]["text"], len(choices))

    def streamed(self, data: bytes) -> Answer | None:
        if not data.endswith(b"data: [DONE]\n\n"):
            return None
        key, texts, ended = "", {}, set()
        for chunk in events(data):
            key = chunk["id"]
            for choice in chunk["choices"]:
                index = choice["index"]
                assert index not in ended, "a choice that is over goes on"
                texts[index] = texts.get(index, "") + choice["text"]
                if choice["finish_reason"] is not None:
                    self._check(choice)
                    ended.add(index)
        assert ended == texts.keys() == set(range(len(texts))), data
        return self._answer(key, texts[0], len(texts))

    def _check(self, choice: dict[str, Any]) -> None:
        assert choice["finish_reason"] in ("stop", "length"), choice
        if (logprobs := choice["logprobs"]) is not None:
            sizes = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "text_offset")}
            assert len(sizes) == 1, choice

    def _answer(self, key: str, text: str, choices: int) -> Answer:
        return Answer(key.removeprefix("cmpl-"), text, [], [text], choices - 1)

    def complaint(self, payload: Any) -> str:
        error = payload["error"]
        assert error.keys() == {"message", "type", "param", "code"}, error
        return str(error["message"])


def _text(piece: Any) -> str:
    """What was put among the pieces by others may be a message."""
    return piece if isinstance(piece, str) else str(piece.get("content"))
