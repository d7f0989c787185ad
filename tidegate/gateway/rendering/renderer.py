"""Renders messages to token ids with the model's chat template.

A first prompt is rendered and encoded completely. A follow-up keeps the recorded ids and encodes only the
suffix: the text that the template renders after the reply, from the end of its turn on. Sampled text is never
encoded again. The turn boundary is completed: the model stops at its end-of-turn token, templates render more
than that (`<|im_end|>\\n`), and a truncated reply has no end.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import StartError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.reply import THOUGHT_END, THOUGHT_START
from tidegate.gateway.parsing.tool_calls.registry import MARKERS
from tidegate.gateway.rendering.chat_template import ChatTemplate, with_short_ids
from tidegate.gateway.rendering.messages import normalized
from tidegate.gateway.rendering.suffixes import (
    MINIMAL_PROMPT,
    Continuation,
    SuffixCache,
    Suffixes,
    Unrenderable,
)
from tidegate.gateway.rendering.tokenizer import Codec, load_tokenizer
from tidegate.service import exact
from tidegate.turn import Ids
from tidegate.types import Message

__all__ = ["LargeText", "Renderer", "Unrenderable", "load_tokenizer"]

_CACHED_ROOTS = 256
# 256 prompts of so many ids of 4 bytes take 256 MB.
_MOST_CACHED_IDS = 2**18
_STEP = 2**16


class LargeText(Exception):
    """A text is too long to encode on the event loop."""

    branch_reason: str | None = None
    """Why the request is a branch, if it was attached: attached again, it is compared with itself."""


class Renderer:
    """Renders prompts with a model's tokenizer and template. Thread-safe; performs no I/O."""

    def __init__(self, tokenizer: Any, extra_stop_ids: Sequence[int] = ()) -> None:
        self.codec = Codec(tokenizer, visible=(*MARKERS, THOUGHT_START, THOUGHT_END))
        self.encode, self.decode = self.codec.encode, self.codec.decode
        self.token_text = self.codec.token_text
        self.template = ChatTemplate(tokenizer)
        eos = tokenizer.eos_token_id
        stops = {*extra_stop_ids, *([] if eos is None else [eos])}
        try:
            self.template.render(MINIMAL_PROMPT, None, {})
        except Exception as error:
            raise StartError(f"the model's chat template fails on a single user message: {error}") from error
        suffixes = Suffixes(self.template, self.codec.added, [self.token_text(stop) for stop in stops])
        self.past_turn_end, self.turn_end = suffixes.past_turn_end, suffixes.turn_end
        self.past_turn_end_ids = self.encode(self.past_turn_end) if self.past_turn_end else []
        self.stop_ids = sorted({*stops, *(self.encode(self.turn_end) if self.turn_end else ())})
        self.escaped_requests = 0
        """Requests with special-token text in their messages, tools or template options."""
        self._short_ids = self.template.needs_short_ids
        self._stops = frozenset(self.stop_ids)
        self._suffixes = SuffixCache(suffixes)
        self._roots: OrderedDict[bytes, Ids] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def invalidated_templates(self) -> int:
        """Suffix templates that a later rendering contradicted, and that are no longer used."""
        return self._suffixes.invalidated

    @classmethod
    def load(cls, model: Path) -> Renderer:
        return cls(load_tokenizer(model), _generation_stop_ids(model))

    def encode_prompt(
        self, messages: list[Message], tools: Any, options: dict[str, Any], max_characters: int | None = None
    ) -> Ids:
        """Ids of a complete prompt; shape [prompt]. Raises ApiError if the template fails, LargeText above
        `max_characters` characters."""
        payload = exact.dumps(messages)
        # Templates may write today's date.
        more = exact.dumps((tools, options, self.template.dates()))
        key = blake2b(payload + more, digest_size=16).digest()
        with self._lock:
            if key in self._roots:
                self._roots.move_to_end(key)
                return self._roots[key]
        _check(len(payload), max_characters)
        text = self.render_text(*self._escaped((messages, tools, options)))
        _check(len(text), max_characters)
        ids = _array(self.encode(text))
        if len(ids) <= _MOST_CACHED_IDS:
            with self._lock:
                self._roots[key] = ids
                if len(self._roots) > _CACHED_ROOTS:
                    self._roots.popitem(last=False)
        return ids

    def _escaped(self, parts: tuple[Any, ...]) -> Any:
        """Returns messages, tools and template options with escaped special-token text, and counts requests
        that have such text."""
        escaped = self.codec.escape_all(parts)
        if escaped != parts:
            with self._lock:
                self.escaped_requests += 1
        return escaped

    def render_text(
        self, messages: list[Message], tools: Any, options: dict[str, Any], prompt: bool = True
    ) -> str:
        """The text of a history, with `prompt` including the generation prompt. Raises ApiError."""
        if self._short_ids:
            messages = with_short_ids(messages)
        try:
            return self.template.render(messages, tools, options, prompt)
        except Exception as error:  # noqa: BLE001 - templates raise arbitrary exceptions
            raise ApiError(f"messages: the model's chat template rejects them: {error}") from None

    def renders_alike(
        self, one: list[Message], other: list[Message], tools: Any, options: dict[str, Any]
    ) -> bool:
        try:
            first, second = (
                self.render_text(normalized(messages), tools, options) for messages in (one, other)
            )
        except ApiError:
            return False
        return first == second

    def used_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that the template reads; others do not change a prompt."""
        return {name: value for name, value in options.items() if name in self.template.variables}

    def encode_suffix(
        self,
        context: Callable[[], list[Message]],
        reply: Message,
        new: list[Message],
        tools: Any,
        options: dict[str, Any],
        last_id: int | None,
        max_characters: int | None = None,
    ) -> Ids:
        """Ids that `new` adds after the recorded reply, including the end of its turn; shape [delta].

        `context` returns the messages before the reply, if the template depends on them; `reply` is the
        reply's template form, `last_id` the last id that the model sampled for it. Raises Unrenderable if the
        template has no suffix after this reply, LargeText above `max_characters` characters.
        """
        _check(len(exact.dumps(new)), max_characters)
        # Some templates write the names of the reply's calls into their results.
        reply, new, tools, options = self._escaped((reply, new, tools, options))
        if self._short_ids:
            before = context
            context = lambda: with_short_ids(before())  # noqa: E731 - wraps the argument
            [reply], new = with_short_ids([reply]), with_short_ids(new)
        text = self._suffixes.after(context, Continuation(reply, new, tools, options))
        # Encoded with the end of turn: tokenization of the first new token depends on it.
        return _array(self._without_sampled_end(self.encode(text), last_id))

    def _without_sampled_end(self, ids: list[int], last_id: int | None) -> list[int]:
        """`ids` without the end of turn if the model sampled it: any stop token, which in families without an
        end-of-turn token is the marker of the next role."""
        if not ids or last_id not in self._stops:
            return ids
        return ids[1:] if ids[0] == last_id or ids[:1] == self.past_turn_end_ids else ids


def _check(characters: int, max_characters: int | None) -> None:
    if max_characters is not None and characters > max_characters:
        raise LargeText


def _array(ids: list[int]) -> Ids:
    """Convert ids in steps, so that other threads run in between."""
    if len(ids) <= _STEP:
        return np.asarray(ids, dtype=np.int32)
    steps = range(0, len(ids), _STEP)
    return np.concatenate([np.asarray(ids[start : start + _STEP], dtype=np.int32) for start in steps])


def _generation_stop_ids(model: Path) -> list[int]:
    path = model / "generation_config.json"
    if not path.is_file():
        return []
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else [token for token in eos or () if isinstance(token, int)]
