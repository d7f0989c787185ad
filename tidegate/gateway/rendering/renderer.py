"""Tokens in: messages become ids through the model's own chat template.

A first prompt is rendered and encoded whole. A follow-up keeps the recorded ids and adds only what its
new messages add: the text that the template writes after a reply is encoded, from the end of the reply's
turn on. Sampled text is never encoded again. The turn boundary is mended: the model stops at its
end-of-turn token, templates write more than that (`<|im_end|>\\n`), and a reply that was cut has no end.
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
import orjson

from tidegate.errors import StartError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.reasoning import CLOSE as THOUGHT_END
from tidegate.gateway.parsing.reasoning import OPEN as THOUGHT_START
from tidegate.gateway.parsing.tool_calls.registry import MARKERS
from tidegate.gateway.rendering.call_ids import wants_short_ids, with_short_ids
from tidegate.gateway.rendering.chat_template import ChatTemplate, Suffixes, Unrenderable
from tidegate.gateway.rendering.messages import in_one_spelling
from tidegate.gateway.rendering.suffix_cache import MINIMAL_PROMPT, SuffixCache
from tidegate.gateway.rendering.tokenizer import Codec, load_tokenizer
from tidegate.types import Ids, Message

__all__ = ["LargeText", "Renderer", "Unrenderable", "load_tokenizer"]

_CACHED_ROOTS = 256
_MOST_CACHED_IDS = 2**18
_STEP = 2**16


class LargeText(Exception):
    """A text is too long to be encoded on the event loop."""


class Renderer:
    """Renders with one model's tokenizer and template; never blocks on I/O. Threads may share it."""

    def __init__(self, tokenizer: Any, extra_stop_ids: Sequence[int] = ()) -> None:
        self.codec = Codec(tokenizer, shown=(*MARKERS, THOUGHT_START, THOUGHT_END))
        self.encode, self.decode = self.codec.encode, self.codec.decode
        self.token_text = self.codec.token_text
        self.template = ChatTemplate(tokenizer)
        eos = tokenizer.eos_token_id
        stops = {*extra_stop_ids, *([] if eos is None else [eos])}
        try:
            self.template.render(MINIMAL_PROMPT, None, {})
        except Exception as error:
            raise StartError(f"the model's chat template fails on a plain question: {error}") from error
        suffixes = Suffixes(self.template, self.codec.added, [self.token_text(stop) for stop in stops])
        self.closing, self.ending = suffixes.closing, suffixes.ending
        self.closing_ids = self.encode(self.closing) if self.closing else []
        self.stop_ids = sorted({*stops, *(self.encode(self.ending) if self.ending else ())})
        self.shielded = 0
        """Requests in whose messages something looked like a control token."""
        self._short_ids = wants_short_ids(self.template)
        self._stops = frozenset(self.stop_ids)
        self._book = SuffixCache(suffixes)
        self._roots: OrderedDict[bytes, Ids] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def dropped_frames(self) -> int:
        """Frames that the template was seen to contradict; each is then rendered every time."""
        return self._book.dropped

    @classmethod
    def load(cls, model: Path) -> Renderer:
        return cls(load_tokenizer(model), _generation_stop_ids(model))

    def root(
        self, messages: list[Message], tools: Any, options: dict[str, Any], most: int | None = None
    ) -> Ids:
        """Ids of a whole prompt; shape [prompt]. Raises Refusal where the template refuses, LargeText where
        it would have to encode more than `most` characters."""
        said = orjson.dumps(messages)
        key = blake2b(said + orjson.dumps((tools, options)), digest_size=16).digest()
        with self._lock:
            if key in self._roots:
                self._roots.move_to_end(key)
                return self._roots[key]
        _check(len(said), most)
        if self.codec.looks_alike(said.decode()):
            messages = self._shielded(messages)
        text = self.write(messages, tools, options)
        _check(len(text), most)
        ids = _array(self.encode(text))
        if len(ids) <= _MOST_CACHED_IDS:
            with self._lock:
                self._roots[key] = ids
                if len(self._roots) > _CACHED_ROOTS:
                    self._roots.popitem(last=False)
        return ids

    def _shielded(self, messages: list[Message]) -> list[Message]:
        with self._lock:
            self.shielded += 1
        shielded: list[Message] = self.codec.shield_all(messages)
        return shielded

    def write(self, messages: list[Message], tools: Any, options: dict[str, Any], prompt: bool = True) -> str:
        """The text of a history; with `prompt` up to where the model is to speak. Raises Refusal."""
        if self._short_ids:
            messages = with_short_ids(messages)
        try:
            return self.template.render(messages, tools, options, prompt)
        except Exception as error:  # noqa: BLE001 - the template is the model's code; it refuses as it likes
            raise ApiError(f"messages: the model's chat template refuses them: {error}") from None

    def alike(self, one: list[Message], other: list[Message], tools: Any, options: dict[str, Any]) -> bool:
        """Whether the template writes two histories as the same text."""
        try:
            texts = [self.write(in_one_spelling(messages), tools, options) for messages in (one, other)]
        except ApiError:
            return False
        return texts[0] == texts[1]

    def options_read(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those of the options that the template reads: no other one changes a prompt."""
        return {name: value for name, value in options.items() if name in self.template.variables}

    def follow_up(
        self,
        context: Callable[[], list[Message]],
        reply: Message,
        new: list[Message],
        tools: Any,
        options: dict[str, Any],
        last_id: int | None,
        most: int | None = None,
    ) -> Ids:
        """Ids that `new` adds after the recorded reply, the mended boundary included; shape [delta].

        `context` gives the messages before the reply (asked only where the template looks back), `reply`
        its template form, `last_id` the last id that the model sampled for it.
        Raises Unrenderable where the template has no text of its own for what follows a reply, LargeText
        where it would have to encode more than `most` characters.
        """
        said = orjson.dumps(new)
        _check(len(said), most)
        if self.codec.looks_alike(said.decode()):
            new = self._shielded(new)
        if self._short_ids:
            before = context
            context = lambda: with_short_ids(before())  # noqa: E731 - the same thing, mapped
            [reply], new = with_short_ids([reply]), with_short_ids(new)
        text = self._book.after(context, reply, new, tools, options)
        # Encoded together with the end of turn, so that the first new token sees what stands before it.
        return _array(self._mended(self.encode(text), last_id))

    def _mended(self, ids: list[int], last_id: int | None) -> list[int]:
        """`ids` without the end of turn that the model sampled itself.

        Any token that stops the model ends its turn, so none is put after another. Where a family has no
        closing token, the model stops at the marker of the role that it expects next.
        """
        if not ids or last_id not in self._stops:
            return ids
        return ids[1:] if ids[0] == last_id or ids[:1] == self.closing_ids else ids


def _check(characters: int, most: int | None) -> None:
    if most is not None and characters > most:
        raise LargeText


def _array(ids: list[int]) -> Ids:
    """In steps, between which other threads run."""
    if len(ids) <= _STEP:
        return np.asarray(ids, dtype=np.int32)
    steps = range(0, len(ids), _STEP)
    return np.concatenate([np.asarray(ids[start : start + _STEP], dtype=np.int32) for start in steps])


def _generation_stop_ids(model: Path) -> list[int]:
    path = model / "generation_config.json"
    if not path.is_file():
        return []
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else [one for one in eos or () if isinstance(one, int)]
