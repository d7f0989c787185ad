"""Redacts the texts of requests before anything is recorded; the model sees the redacted texts as well.

So a conversation's tokens stay exactly those of its recorded text, and nothing else is kept of the original.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import orjson

from tidegate.gateway.errors import ApiError
from tidegate.gateway.request import RawBody
from tidegate.tracebacks import where

log = logging.getLogger("tidegate.gateway")
Redaction = Callable[[str], str]
"""Returns a text without what must not be kept. It must return its own results unchanged."""

TEXTS = frozenset(("messages", "input", "instructions", "system", "prompt", "suffix", "metadata", "user"))
"""Fields of a request with the client's texts, in any dialect."""
STRUCTURE = frozenset((
    "type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "name", "status", "session_id",
    "signature", "encrypted_content", "media_type", "data", "format",
))  # fmt: skip
"""Fields within them whose values are no texts."""


def redact_body(body: RawBody, redaction: Redaction) -> bytes:
    """Return a request body with redacted texts.

    A body that is no JSON object is returned unchanged: it is refused later. Token ids are not redacted.

    Raises:
        ApiError: The redaction failed, or the body is nested too deeply.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return bytes(body)
    if not isinstance(value, dict):
        return bytes(body)
    for name in value.keys() & TEXTS:
        value[name] = redact_value(value[name], redaction)
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ApiError(f"the body cannot be redacted: {error}"[:300], code="redaction_failed") from None


def redact_value(value: Any, redaction: Redaction) -> Any:
    """Return JSON data with redacted texts. Raises ApiError if the redaction fails."""
    root: list[Any] = [value]
    remaining: list[Any] = [root]  # no recursion: the depth is the client's
    while remaining:
        container = remaining.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in list(items):
            if isinstance(item, dict | list):
                remaining.append(item)
            elif isinstance(item, str) and key not in STRUCTURE:
                container[key] = redact_text(item, redaction)
    return root[0]


def redact_text(text: str, redaction: Redaction) -> str:
    """Return a redacted text. Raises ApiError, without the text, if the redaction fails."""
    try:
        redacted = redaction(text)
    except Exception as error:  # noqa: BLE001 - logged without its message, which may hold the text
        log.error("gateway.redact failed: %s %s", type(error).__name__, where(error))
        raise ApiError(
            f"gateway.redact failed with {type(error).__name__}; nothing of the request was recorded",
            code="redaction_failed",
        ) from None
    if not isinstance(redacted, str):
        raise ApiError(
            f"gateway.redact returned {type(redacted).__name__}, not a text; nothing was recorded",
            code="redaction_failed",
        )
    return redacted
