"""Changes of histories that clients make: other spellings, edits, other orders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

ROLES = ["system", "developer", "user", "assistant", "tool", "function", "critic", "", None, 7]
Change = Callable[[random.Random, list[Any]], list[Any]]


def changed(rng: random.Random, history: list[Any]) -> list[Any]:
    """The history as a client may send it back: mostly as it was."""
    while history and rng.random() < 0.35:
        history = rng.choice(CHANGES)(rng, history)
    return history


def _respelled(rng: random.Random, history: list[Any]) -> list[Any]:
    """Every item in other words that mean the same."""
    return [_respell(rng, item) for item in history]


def _respell(rng: random.Random, item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    pairs = list(item.items())
    rng.shuffle(pairs)
    item = dict(pairs)
    content = item.get("content")
    if isinstance(content, str):
        item["content"] = rng.choice(
            [content, content.strip(), f"{content}\n", [{"type": "text", "text": content}], content or None]
        )
    if item.get("tool_calls"):
        item["tool_calls"] = [_respell_call(rng, call) for call in item["tool_calls"]]
    elif rng.random() < 0.3:
        item["tool_calls"] = rng.choice([None, []])
    return item


def _respell_call(rng: random.Random, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    call = {"id": rng.choice([call.get("id"), "c1", None]), "type": "function", "function": dict(function)}
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    call["function"]["arguments"] = rng.choice(
        [json.dumps(arguments, indent=1), json.dumps(arguments, separators=(",", ":")), arguments]
    )
    if rng.random() < 0.3:
        del call["id"]
    return call


def _cut(rng: random.Random, history: list[Any]) -> list[Any]:
    return history[: rng.randint(0, len(history))]


def _dropped(rng: random.Random, history: list[Any]) -> list[Any]:
    at = rng.randrange(len(history))
    return [*history[:at], *history[at + 1 :]]


def _doubled(rng: random.Random, history: list[Any]) -> list[Any]:
    at = rng.randrange(len(history))
    return [*history[: at + 1], *history[at:]]


def _swapped(rng: random.Random, history: list[Any]) -> list[Any]:
    at, other = rng.randrange(len(history)), rng.randrange(len(history))
    history = list(history)
    history[at], history[other] = history[other], history[at]
    return history


def _edited(rng: random.Random, history: list[Any]) -> list[Any]:
    at = rng.randrange(len(history))
    if not isinstance(history[at], dict):
        return history
    return [*history[:at], {**history[at], "content": rng.choice(["edited", "", "4"])}, *history[at + 1 :]]


def _recast(rng: random.Random, history: list[Any]) -> list[Any]:
    at = rng.randrange(len(history))
    if not isinstance(history[at], dict):
        return history
    return [*history[:at], {**history[at], "role": rng.choice(ROLES)}, *history[at + 1 :]]


def _injected(rng: random.Random, history: list[Any]) -> list[Any]:
    at = rng.randint(0, len(history))
    said = {"role": rng.choice(["assistant", "user", "system", "tool"]), "content": "injected"}
    return [*history[:at], said, *history[at:]]


def _compacted(rng: random.Random, history: list[Any]) -> list[Any]:
    return [
        {"role": "user", "content": "In short: nothing came of it."},
        *history[rng.randint(1, len(history)) :],
    ]


CHANGES: list[Change] = [
    _respelled, _respelled, _cut, _dropped, _doubled, _swapped, _edited, _recast, _injected, _compacted
]  # fmt: skip
