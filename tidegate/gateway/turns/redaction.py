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
"""Removes personal data from a text. It must return its own results unchanged."""

TEXTS = frozenset(("messages", "input", "instructions", "system", "prompt", "suffix", "metadata", "user"))
"""Fields of a request with the client's texts, in any dialect."""
STRUCTURE = frozenset((
    "type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "status", "signature", "media_type",
    "data", "encrypted_content", "format",
))  # fmt: skip
"""Fields of messages and their parts that have no free text. So has `name`, except beside `role`."""
FREE = frozenset(("metadata", "input", "arguments"))
"""Fields with a client's own data: all texts in them are redacted, and the names of their fields."""
DEEPEST = 200
"""Limit of the nesting of a body; the parser, which runs later, has a lower one."""


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
    metadata = value.get("metadata")
    name_of_conversation = metadata.pop("session_id", None) if isinstance(metadata, dict) else None
    for name in value.keys() & TEXTS:
        value[name] = redact_value(value[name], redaction, free=name == "metadata")
    if name_of_conversation is not None:
        value["metadata"]["session_id"] = name_of_conversation
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ApiError(f"the body cannot be redacted: {error}"[:300], code="redaction_failed") from None


def redact_value(value: Any, redaction: Redaction, *, free: bool = False, depth: int = 0) -> Any:
    """Return JSON data with redacted texts.

    Args:
        value: The data.
        redaction: The function.
        free: Whether it is a client's own data, without structure.
        depth: Depth of the data in a request.

    Raises:
        ApiError: The redaction failed, or the data is nested too deeply.
    """
    if depth > DEEPEST:
        raise ApiError(
            f"the body is nested more than {DEEPEST} levels and cannot be redacted", code="redaction_failed"
        )
    if isinstance(value, str):
        return redact_text(value, redaction)
    if isinstance(value, list):
        return [redact_value(item, redaction, free=free, depth=depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if free:
        return {
            redact_text(name, redaction): redact_value(item, redaction, free=True, depth=depth + 1)
            for name, item in value.items()
        }
    return {
        name: item
        if isinstance(item, str) and _is_structure(name, value)
        else redact_value(item, redaction, free=name in FREE and isinstance(item, dict), depth=depth + 1)
        for name, item in value.items()
    }


def _is_structure(name: str, part: dict[str, Any]) -> bool:
    return name in STRUCTURE or (name == "name" and "role" not in part)


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
