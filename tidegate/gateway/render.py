"""Tokens in: messages become ids through the model's own chat template.

A first prompt is rendered and encoded whole. A follow-up keeps the recorded ids and adds only what its
new messages add: they are rendered after a stand-in reply, and the text after that reply is encoded.
Sampled text is never encoded again. The turn boundary is mended: the model stops at its end-of-turn
token, templates write more than that (`<|im_end|>\\n`), and a reply that was cut has no end at all.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import orjson
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from tidegate.errors import StartError
from tidegate.gateway.refusal import Refusal
from tidegate.gateway.toolcalls import CLOSE, OPEN
from tidegate.types import Ids, Message

_STAND_IN = "\u2042tide-stand-in\u2042"
_CACHED_ROOTS = 256


class Unrenderable(Exception):
    """The template gives no text that would follow a reply; the history must be rendered whole."""


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a model directory; torch is not imported where `tokenizer.json` is there.

    Raises StartError that says what is missing.
    """
    if not model.is_dir():
        raise StartError(f"{model} is not a directory; give the directory of a Hugging Face model")
    try:
        if (model / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
        else:
            from transformers import AutoTokenizer  # imports torch, where it is installed

            tokenizer = AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError, KeyError) as error:
        raise StartError(f"{model}: its tokenizer cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise StartError(f"{model}: its tokenizer has no chat template; the gateway renders with it")
    return tokenizer


class Renderer:
    """Renders with one model's tokenizer and template. Not thread-safe, and never blocks on I/O."""

    def __init__(self, tokenizer: Any, extra_stop_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend
        shown = {tokenizer.convert_tokens_to_ids(marker) for marker in (OPEN, CLOSE)}
        self._hidden = frozenset(tokenizer.all_special_ids) - shown
        self._special = dict(tokenizer.special_tokens_map)
        self._roots: OrderedDict[bytes, Ids] = OrderedDict()
        self._template_of_tools: dict[bool, jinja2.Template] = {}
        self.closing = self._find_closing()
        self.closing_ids = self.encode(self.closing) if self.closing else []
        eos = tokenizer.eos_token_id
        self.stop_ids = sorted({*extra_stop_ids, *([] if eos is None else [eos]), *self.closing_ids[-1:]})
        self._bare = self._is_local()

    @classmethod
    def load(cls, model: Path) -> Renderer:
        return cls(load_tokenizer(model), _generation_stop_ids(model))

    def encode(self, text: str) -> list[int]:
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text as the client reads it: without special tokens, but with the tool call markers."""
        kept = [one for one in ids if one not in self._hidden]
        if self._backend is not None:
            text: str = self._backend.decode(kept, skip_special_tokens=False)
            return text
        return str(
            self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def root(self, messages: list[Message], tools: Any, options: dict[str, Any]) -> Ids:
        """Ids of a whole prompt; shape [prompt]. Raises Refusal where the template refuses."""
        key = blake2b(orjson.dumps((messages, tools, options)), digest_size=16).digest()
        if key in self._roots:
            self._roots.move_to_end(key)
            return self._roots[key]
        try:
            text = self._render(messages, tools, options)
        except Exception as error:  # noqa: BLE001 - the template is the model's code; it refuses as it likes
            raise Refusal(f"messages: the model's chat template refuses them: {error}") from None
        ids = np.asarray(self.encode(text), dtype=np.int32)
        self._roots[key] = ids
        if len(self._roots) > _CACHED_ROOTS:
            self._roots.popitem(last=False)
        return ids

    def follow_up(
        self,
        context: Callable[[], list[Message]],
        reply: Message,
        new: list[Message],
        tools: Any,
        options: dict[str, Any],
        last_id: int | None,
    ) -> Ids:
        """Ids that `new` adds after the recorded reply, the mended boundary included; shape [delta].

        `context` gives the messages before the reply (asked only where the template looks back), `reply`
        its template form, `last_id` the last id that the model sampled for it.
        Raises Unrenderable where the template has no text of its own for what follows a reply.
        """
        before = [{"role": "user", "content": "."}] if self._bare else context()
        tail = self._tail(before, reply, new, None if self._bare else tools, options)
        if not self.closing:
            return np.asarray(self.encode(tail), dtype=np.int32)
        at = tail.find(self.closing)
        if at < 0:
            raise Unrenderable(f"the template does not write {self.closing} after a reply")
        # Encoded together with the end of turn, so that the first new token sees what stands before it.
        ids = self.encode(tail[at:])
        size = len(self.closing_ids)
        if ids[:size] != self.closing_ids:
            raise Unrenderable(f"{self.closing} melts into the text after it")
        ended = size == 1 and last_id == self.closing_ids[0]
        return np.asarray(ids[size:] if ended else ids, dtype=np.int32)

    def _tail(
        self, before: list[Message], reply: Message, new: list[Message], tools: Any, options: dict[str, Any]
    ) -> str:
        """The text after a stand-in for the reply."""
        try:
            try:
                stand_in: Message = {"role": "assistant", "content": _STAND_IN}
                text = self._render([*before, stand_in, *new], tools, options)
            except Exception:  # noqa: BLE001 - as above; a second failure is told
                # Some templates want a call for each tool result.
                stand_in = _with_marked_calls(reply)
                text = self._render([*before, stand_in, *new], tools, options)
        except Exception as error:  # noqa: BLE001 - as above; then the history is rendered whole
            raise Unrenderable(str(error)) from None
        _, found, tail = text.rpartition(_STAND_IN)
        if not found or text.count(_STAND_IN) != 1:
            raise Unrenderable("the template does not write a reply's content as it is")
        return tail

    def _render(
        self, messages: list[Message], tools: Any, options: dict[str, Any], prompt: bool = True
    ) -> str:
        template = self._template_of_tools.get(bool(tools))
        if template is None:
            source = self._tokenizer.get_chat_template(None, tools or None)
            template = self._template_of_tools[bool(tools)] = _compile_jinja_template(source)
        return template.render(
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=prompt,
            **{**self._special, **options},
        )

    def _find_closing(self) -> str:
        """The end-of-turn token as the template writes it after a reply; empty if it writes none."""
        history = [_user("."), _assistant(_STAND_IN), _user(".")]
        try:
            _, found, tail = self._render(history, None, {}, prompt=False).rpartition(_STAND_IN)
        except Exception as error:
            raise StartError(f"the model's chat template fails on a plain conversation: {error}") from error
        if not found:
            return ""
        vocabulary = self._tokenizer.get_added_vocab()
        return max((token for token in vocabulary if tail.lstrip().startswith(token)), key=len, default="")

    def _is_local(self) -> bool:
        """Whether what follows a reply depends on the new messages alone, not on what was before it.

        Tried on a battery of histories; if so, follow-ups are rendered after a bare stand-in, which
        costs the same at turn 2 and at turn 1,000.
        """
        tools = [_TOOL]
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        asked: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        answered: Message = {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "f"}
        before = [
            {"role": "system", "content": "s"},
            _user("a"),
            asked,
            answered,
            _assistant("b"),
            _user("c"),
        ]
        for new in ([_user("d")], [answered], [answered, answered, _user("d")], []):
            reply = asked if answered in new else _assistant("e")
            try:
                bare = self._tail([_user(".")], reply, new, None, {})
                whole = self._tail(before, reply, new, tools, {})
            except Unrenderable:
                continue
            if bare != whole:
                return False
        return True


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _with_marked_calls(reply: Message) -> Message:
    """The reply with the stand-in as the last thing that is said in it."""
    calls = [dict(call) for call in reply.get("tool_calls", ())]
    if not calls:
        return _assistant(_STAND_IN)
    calls[-1]["function"] = {"name": "f", "arguments": {"x": _STAND_IN}}
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _generation_stop_ids(model: Path) -> list[int]:
    path = model / "generation_config.json"
    if not path.is_file():
        return []
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else [one for one in eos or () if isinstance(one, int)]


_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
