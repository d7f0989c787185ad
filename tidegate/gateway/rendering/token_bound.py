"""How few tokens a prompt can have: what certainly does not fit is refused before it is encoded.

No token stands for more characters than the longest one has. That bounds a prompt from below where the
tokenizer keeps every character, and the chat template writes contents whole; where either is not known to be
so, there is no bound, and the prompt is encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from tokenizers import pre_tokenizers

from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.messages import text_of
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.rendering.suffix_cache import CALL, MINIMAL_PROMPT
from tidegate.gateway.rendering.tokenizer import BREAK
from tidegate.types import Message

_KEEPING = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})
"""Pre-tokenizers that drop no character, unless they are told to."""
_COMPOSED = 4
"""Characters that NFC may make one of."""
_PROBE = 'a\n\n b </think> "q" <x> {{ y }} é🍎\t1234567890\n' * 200 + "."


def longest_token(tokenizer: Any) -> int | None:
    """The most characters that a token stands for; None where a token may stand for any number of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    spec = orjson.loads(backend.to_str())
    model, steps = spec["model"], _steps(spec["pre_tokenizer"])
    vocabulary = model.get("vocab")
    whole = (
        model["type"] == "BPE"
        and spec["truncation"] is None
        and any(one["type"] == "ByteLevel" for one in steps)
        and all(one["type"] in _KEEPING and one.get("behavior") != "Removed" for one in steps)
        and all(one["type"] == "NFC" for one in _steps(spec["normalizer"]))
        and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        and not any(one["lstrip"] or one["rstrip"] for one in spec["added_tokens"])
    )
    if not whole:
        return None
    # Every character is a byte or more, and a token is written with one sign a byte.
    return max(map(len, (*vocabulary, *(one["content"] for one in spec["added_tokens"]))))


def _steps(spec: Any) -> list[Any]:
    """The parts of a normalizer or pre-tokenizer."""
    if spec is None:
        return []
    if spec["type"] != "Sequence":
        return [spec]
    inner = spec.get("pretokenizers") or spec.get("normalizers") or []
    return [step for one in inner for step in _steps(one)]


def weight(text: str) -> int:
    """How many characters of a text, or a part of one, are in its tokens at least: templates strip contents,
    normalizers compose characters, and what breaks look-alikes of control tokens is taken out again."""
    solid = text.strip()
    if solid.isascii():
        return max(0, len(solid) - 1)
    return max(0, (len(solid) - len(BREAK) * solid.count(BREAK) - 1) // _COMPOSED)


class TokenBound:
    """For one model's tokenizer and template."""

    def __init__(self, renderer: Renderer) -> None:
        self._longest = longest_token(renderer.codec.tokenizer)
        self._roles = frozenset(role for role in ("user", "tool") if _writes_whole(renderer, role))

    def least(self, messages: list[Message], prompt: str | None, weigh: Callable[[str], int] = weight) -> int:
        """The tokens of a prompt of messages, or of a text alone; at least so many."""
        if self._longest is None:
            return 0
        if prompt is not None:
            return -(-weigh(prompt) // self._longest)
        return -(-sum(weigh(self._text(one)) for one in messages) // self._longest)

    def _text(self, message: Any) -> str:
        """What a message surely has in the prompt."""
        if not isinstance(message, dict) or message.get("role") not in self._roles:
            return ""
        try:
            return text_of(message.get("content"), "messages")
        except ApiError:
            return ""  # it is refused by its place later


def _writes_whole(renderer: Renderer, role: str) -> bool:
    """Whether the template writes all of a long content, seen by what comes of one."""
    before: list[Message] = []
    told: Message = {"role": role}
    if role == "tool":
        before = [*MINIMAL_PROMPT, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        told |= {"tool_call_id": CALL["id"], "name": "f"}
    try:
        short, long = (
            len(renderer.write([*before, {**told, "content": content}], None, {}))
            for content in (".", _PROBE)
        )
    except ApiError:
        return False
    return long - short >= len(_PROBE) - 1
