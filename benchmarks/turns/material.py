"""Texts of the benchmark: the agents' messages and the prepared replies of the fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:  # the load generator does not need it
    from tidegate.gateway.rendering.renderer import Renderer

TURN_TOKENS = 64
_VERSION = "7"
_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * (3 + %d)"}}\n</tool_call>'
_PROSE = (
    "First we count the apples that are left in the basket, then those that Tom bought on Tuesday; together "
    "they make the number that was asked for, from which the ones that he gave away must still be taken. "
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression and returns its value.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 12 * (3 + 4)."}},
            "required": ["expression"],
        },
    },
}
SYSTEM = (
    "You solve word problems step by step. Think before you answer, use the calculator for every "
    "computation, and end with the answer alone on a line that starts with ####."
)


def question(session: str) -> str:
    """The first user message of a session, different for each session."""
    return (
        f"Problem {session}: Tom has three apples and buys five more on Tuesday. On Wednesday he gives a "
        "quarter of them to his sister, who already had twelve. How many apples do they have together?"
    )


def write_replies(path: Path, renderer: Renderer, count: int = 16, tokens: int = TURN_TOKENS) -> None:
    """Writes replies of so many tokens, every second one with a tool call, in every response format."""
    path.write_bytes(orjson.dumps([_reply(renderer, n, tokens) for n in range(count)]))


def _reply(renderer: Renderer, n: int, tokens: int) -> dict[str, str]:
    end = renderer.encode(_CALL % n) if n % 2 else []
    room = tokens - 1 - len(end)
    prose = renderer.encode(f"{n}. " + _PROSE * -(-tokens // 8))
    ids = [*prose[:room], *end, renderer.stop_ids[0]]
    assert len(ids) == tokens, f"the tool call takes {len(end)} tokens with this tokenizer: too many"
    text = renderer.decode(ids[:-1])
    logprobs = [-((token * 7919 + n) % 1000) / 400 for token in ids]
    return {
        "generate": orjson.dumps(_generated(ids, logprobs, text, tokens)).decode(),
        "events": "".join(
            f"data: {orjson.dumps(_generated(ids, logprobs, text, size)).decode()}\n\n"
            for size in range(8, tokens + 1, 8)
        )
        + "data: [DONE]\n\n",
        "chat": orjson.dumps(_chat(text, tokens)).decode(),
        "chat_events": "".join(
            f"data: {orjson.dumps(event).decode()}\n\n" for event in _chat_events(text, tokens)
        )
        + "data: [DONE]\n\n",
        "traced": orjson.dumps(_traced(renderer, ids, logprobs, text)).decode(),
    }


def _generated(ids: list[int], logprobs: list[float], text: str, size: int) -> dict[str, Any]:
    """A reply in SGLang's format; with `size` < the tokens of the reply, an event of its stream."""
    return {
        "text": text[: len(text) * size // len(ids)],
        "output_ids": ids[:size],
        "meta_info": {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": ids[-1]} if size == len(ids) else None,
            "prompt_tokens": 512,
            "completion_tokens": size,
            "cached_tokens": 448,
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, ids, strict=True)][:size],
            "weight_version": _VERSION,
            "weight_versions": [{"version": _VERSION, "start": 0, "end": size}],
            "e2e_latency": 0.5,
        },
    }


def _chat(text: str, tokens: int) -> dict[str, Any]:
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 512, "completion_tokens": tokens, "total_tokens": 512 + tokens},
    }


def _chat_events(text: str, tokens: int) -> list[dict[str, Any]]:
    """The chunks of a chat stream: as many texts as `events` has, then the finish reason."""
    pieces = tokens // 8
    size = -(-len(text) // pieces)
    deltas: list[dict[str, Any]] = [{"content": text[at : at + size]} for at in range(0, len(text), size)]
    chunk = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    ends = [None] * len(deltas) + ["stop"]
    return [
        {**chunk, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]


def _traced(renderer: Renderer, ids: list[int], logprobs: list[float], text: str) -> dict[str, Any]:
    """A chat reply with token ids and logprobs, in vLLM's format."""
    reply = _chat(text, len(ids))
    rows = []
    for token, logprob in zip(ids, logprobs, strict=True):
        piece = renderer.token_text(token)
        rows.append({"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []})
    reply["choices"][0] |= {"logprobs": {"content": rows}, "token_ids": ids}
    return {**reply, "prompt_token_ids": list(range(512))}
