"""Invalid and unusual values and texts, determined by the random stream."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**40, 1.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "auto", "none", "required", "text", "user", "assistant", "tool", "nul \x00", "\ud800",
    "\udfff\ud800", "\ud7ff\U0001f34e", "e\u0301", "\u202e", "<|im_end|>", "</tool_call>", "<tool_call>",
    "<think>", "{{ 7 * 7 }}", "{%", [], {}, [None], [[]], {"a": None}, {"": {}}, {"type": "text"},
    [{"type": "text", "text": "hi"}], [{"type": "image_url", "image_url": {"url": "data:,"}}],
    {"type": "json_object"}, {"type": "function"},
]  # fmt: skip
NAMES = [
    "model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "n", "stop",
    "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "top_logprobs", "user",
    "response_format", "frequency_penalty", "chat_template_kwargs", "parallel_tool_calls", "unheard_of",
    "role", "content", "tool_calls", "tool_call_id", "name", "function", "arguments", "id", "type", "text",
    "function_call", "reasoning_content", "refusal", "audio", "input", "instructions", "prompt", "echo",
    "previous_response_id", "output", "call_id", "system", "tool_use_id", "stop_sequences", "thinking",
    "max_output_tokens", "reasoning", "logit_bias", "best_of", "suffix", "metadata", "store", "is_error", "",
]  # fmt: skip
_DEPTHS = (3, 60, 250, 900, 1100, 20_000)


def junk(rng: random.Random, depth: int = 3) -> Any:
    """Any value; at most `depth` levels deep, but for the rare tower of brackets."""
    kind = rng.random()
    if kind < 0.01:
        return tower(rng)
    if depth == 0 or kind < 0.5:
        return rng.choice(VALUES)
    if kind < 0.7:
        return [junk(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(NAMES): junk(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def tower(rng: random.Random) -> Any:
    value: Any = "deep"
    for _ in range(rng.choice(_DEPTHS[:-2])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def spoiled(rng: random.Random, value: Any) -> Any:
    """The value with something in it replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        value = dict(value)
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            del value[key]
        elif rng.random() < 0.2:
            value[rng.choice(NAMES)] = junk(rng)
        else:
            value[key] = spoiled(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], spoiled(rng, value[index]), *value[index + 1 :]]
    return junk(rng)


def written(rng: random.Random, body: Any) -> bytes:
    """The body as JSON, spelled in one of several ways; now and then not quite JSON."""
    text = json.dumps(body, ensure_ascii=rng.random() < 0.7, indent=rng.choice([None, None, 1]))
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.94:
        return data
    return rng.choice([_twice, _truncated, _flipped, _other, _deep])(rng, data)


def _twice(rng: random.Random, data: bytes) -> bytes:
    """One key more, which may be there already."""
    if not data.startswith(b"{"):
        return data + data
    key, value = json.dumps(rng.choice(NAMES)), json.dumps(junk(rng, 1))
    comma = b"" if data.strip() == b"{}" else b","
    return b"{" + f"{key}: {value}".encode() + comma + data[1:]


def _truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(1) + data[at + 1 :]


def _other(rng: random.Random, _: bytes) -> bytes:
    return rng.choice(
        [
            b"",
            b" ",
            b"null",
            b"{}",
            b"[]",
            b"\xef\xbb\xbf{}",
            b"\x00",
            b"model=m",
            rng.randbytes(rng.randint(1, 40)),
        ]
    )


def _deep(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice(_DEPTHS)
    nested = b"[" * depth + b"]" * depth if rng.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth
    return (
        b'{"messages": ' + nested + b"}" if rng.random() < 0.5 else data[:-1] + b', "user": ' + nested + b"}"
    )


def smaller(value: Any) -> Iterator[Any]:
    """Every value that lacks one part of this one, large parts first."""
    if isinstance(value, dict):
        for key in value:
            yield {name: part for name, part in value.items() if name != key}
        for key in value:
            yield from ({**value, key: part} for part in smaller(value[key]))
    elif isinstance(value, list):
        for at in range(len(value)):
            yield [*value[:at], *value[at + 1 :]]
        for at in range(len(value)):
            yield from ([*value[:at], part, *value[at + 1 :]] for part in smaller(value[at]))
    elif isinstance(value, str) and len(value) > 1:
        yield value[: len(value) // 2]
        yield value[len(value) // 2 :]
