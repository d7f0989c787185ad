"""Reads chats, and renders them to token ids as the gateway does: with the model's chat template.

The first prompt is rendered as a whole. After each reply the ids so far are kept, and only the text that the
template adds is encoded. So a model sees in training what it sees when it samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, TidegateError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.messages import in_call_order, template_form
from tidegate.gateway.rendering.renderer import Renderer, Unrenderable
from tidegate.service import exact
from tidegate.sft.demonstration import Demonstration, demonstration
from tidegate.turn import Ids
from tidegate.types import Message


def read_chats(path: Path, renderer: Renderer, replies: str) -> Iterator[Demonstration]:
    """Yield the chats of a JSONL file.

    Args:
        path: The file. A line is an object with `messages`, and may have `tools` and `task_id`. A reply with
            `"weight": 0` is not trained on.
        renderer: Renders them.
        replies: Which replies are trained on: `all`, or the `last` of each chat.

    Raises:
        ConfigError: The file does not exist, or a line is no chat that the template renders.
    """
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            messages, tools = _chat(line)
            sequences = encode_chat(renderer, messages, tools, _chosen(messages, replies))
        except (ApiError, TidegateError) as error:
            raise ConfigError(f"{where}: {error}") from error
        yield demonstration(str(line.get("task_id") or where), where, sequences)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a JSONL file, each with its line number; raises ConfigError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, exact.loads_strictly(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"sft.chats: {path} cannot be read: {error.strerror or error}") from error


def _chat(line: Any) -> tuple[list[Any], Any]:
    """Return the messages and tools of a line; raises ConfigError."""
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError('a chat is an object with a list "messages"')
    tools = line.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"tools are a list, not {type(tools).__name__}")
    return messages, tools


def _chosen(messages: Sequence[Any], replies: str) -> set[int]:
    """Return the indices of the replies to train on. The first message is never one: it has no prompt."""
    found = [
        index
        for index, message in enumerate(messages)
        if index and isinstance(message, dict) and message.get("role") == "assistant"
    ]
    return {index for index in found[-1 if replies == "last" else 0 :] if messages[index].get("weight", 1)}


def encode_chat(
    renderer: Renderer, messages: Sequence[Any], tools: Any, chosen: Collection[int]
) -> list[tuple[Ids, npt.NDArray[np.bool_]]]:
    """Return a chat as (ids, mask) pairs: one, or several where the template rewrites earlier text.

    Args:
        renderer: Renders it.
        messages: Its messages, as OpenAI's API has them.
        tools: Schemas of the tools, or None.
        chosen: Indices of the replies whose tokens are trained on.

    Raises:
        ApiError: A message is invalid, or the template rejects it.
        ConfigError: The template does not render a reply as the model would sample it.
    """
    forms = in_call_order([template_form(message, index) for index, message in enumerate(messages)])
    forms, tools = [escaped(renderer, form) for form in forms], renderer.codec.escape_all(tools)
    sequences: list[tuple[list[int], list[bool]]] = []
    last = 0
    for index in [index for index, form in enumerate(forms) if index and form["role"] == "assistant"]:
        if index > max(chosen, default=0):
            break
        added = _continuation(renderer, forms, last, index, tools, sequences[-1][0]) if last else None
        if added is None:
            added = renderer.encode(renderer.render_text(forms[:index], tools, {}))
            sequences.append(([], []))
        ids, mask = sequences[-1]
        reply = reply_ids(renderer, forms[:index], forms[index], tools)
        ids += [*added, *reply]
        mask += [False] * len(added) + [index in chosen] * len(reply)
        last = index
    return [(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)) for ids, mask in sequences]


def escaped(renderer: Renderer, form: Message) -> Message:
    """Escape special-token text, which a message or a reply can only quote."""
    sampled = {"content", "reasoning_content"} if form["role"] == "assistant" else set()
    return {key: renderer.codec.escape_all(item, sampled=key in sampled) for key, item in form.items()}


def _continuation(
    renderer: Renderer, forms: list[Message], last: int, index: int, tools: Any, ids: Sequence[int]
) -> list[int] | None:
    """Return the ids between the reply `last`, in which `ids` end, and the next one; None if the template
    cannot be continued after it."""
    try:
        new = forms[last + 1 : index]
        added = renderer.encode_suffix(lambda: forms[:last], forms[last], new, tools, {}, ids[-1])
    except Unrenderable:
        return None
    return [int(token) for token in added]


def reply_ids(renderer: Renderer, before: list[Message], reply: Message, tools: Any) -> list[int]:
    """Return the ids of a reply after a prompt, up to and including the token that ends it.

    Args:
        renderer: Renders it.
        before: Template forms of the messages before it, without special-token text.
        reply: Its template form, likewise.
        tools: Schemas of the tools, likewise, or None.

    Raises:
        ApiError: The template rejects the messages.
        ConfigError: The template does not render the reply after its generation prompt, or without an end.
    """
    prompt = renderer.render_text(before, tools, {})
    whole = renderer.render_text([*before, reply], tools, {}, prompt=False)
    where = f"messages[{len(before)}]"
    if not whole.startswith(prompt):
        raise ConfigError(
            f"{where}: the chat template does not render this reply after its generation prompt, which ends "
            f"in {prompt[-40:]!r}, so the model would not sample it like that"
        )
    ids = renderer.encode(whole[len(prompt) :])
    ends = [at for at, token in enumerate(ids) if token in renderer.stop_ids]
    if not ends:
        raise ConfigError(
            f"{where}: the chat template writes no token that ends the reply, so the model would not learn "
            "to end it"
        )
    return ids[: ends[0] + 1]
