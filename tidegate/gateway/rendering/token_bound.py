"""Computes a lower bound of a prompt's tokens, to refuse oversized prompts before they are encoded.

A token stands for at most as many characters as the longest one. This bounds a prompt if the tokenizer drops
no character and the chat template renders contents unchanged; otherwise the bound is 0, and the prompt is
encoded.
"""

from __future__ import annotations

from typing import Any

import orjson
from tokenizers import pre_tokenizers

from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.messages import text_of
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.rendering.suffixes import CALL, MINIMAL_PROMPT
from tidegate.gateway.rendering.tokenizer import ESCAPE, steps
from tidegate.types import Message

_KEEPING = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})
"""Pre-tokenizers that drop no character by default."""
_COMPOSED = 4
"""Most characters that NFC composes into one."""
_PROBE = 'a\n\n b </think> "q" <x> {{ y }} é🍎\t1234567890\n' * 200 + "."


def max_token_length(tokenizer: Any) -> int | None:
    """The most characters that a token stands for; None if unbounded."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    spec = orjson.loads(backend.to_str())
    model, splits = spec["model"], steps(spec["pre_tokenizer"])
    vocabulary = model.get("vocab")
    lossless = (
        model["type"] == "BPE"
        and spec["truncation"] is None
        and any(step["type"] == "ByteLevel" for step in splits)
        and all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in splits)
        and all(step["type"] == "NFC" for step in steps(spec["normalizer"]))
        and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        and not any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
    )
    if not lossless:
        return None
    # A character is at least one byte, and the vocabulary writes one character per byte.
    return max(map(len, (*vocabulary, *(token["content"] for token in spec["added_tokens"]))))


def min_characters(text: str) -> int:
    """Lower bound of the characters that the tokens of a text stand for: templates strip contents,
    normalizers compose characters, and escapes of special tokens are removed."""
    solid = text.strip()
    if solid.isascii():
        return max(0, len(solid) - 1)
    return max(0, (len(solid) - len(ESCAPE) * solid.count(ESCAPE) - 1) // _COMPOSED)


class TokenBound:
    """Lower bound of prompt tokens for a tokenizer and template."""

    def __init__(self, renderer: Renderer) -> None:
        self._max_token_length = max_token_length(renderer.codec.tokenizer)
        self._roles = frozenset(
            role for role in ("user", "tool") if _writes_content_unchanged(renderer, role)
        )

    def min_tokens(self, messages: list[Message], prompt: str | None) -> int:
        """Lower bound of the tokens of messages, or of the text `prompt` if given."""
        if self._max_token_length is None:
            return 0
        if prompt is not None:
            return -(-min_characters(prompt) // self._max_token_length)
        return -(-sum(min_characters(self._text(message)) for message in messages) // self._max_token_length)

    def _text(self, message: Any) -> str:
        """The text that a message certainly adds to the prompt."""
        if not isinstance(message, dict) or message.get("role") not in self._roles:
            return ""
        try:
            return text_of(message.get("content") or "", "messages")
        except ApiError:
            return ""  # refused later, with its index


def _writes_content_unchanged(renderer: Renderer, role: str) -> bool:
    before: list[Message] = []
    message: Message = {"role": role}
    if role == "tool":
        before = [*MINIMAL_PROMPT, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        message |= {"tool_call_id": CALL["id"], "name": "f"}
    try:
        short, long = (
            len(renderer.render_text([*before, {**message, "content": content}], None, {}))
            for content in (".", _PROBE)
        )
    except ApiError:
        return False
    return long - short >= len(_PROBE) - 1
