"""Redacts the texts of requests before anything is recorded; the model sees the redacted texts as well.

So a conversation's tokens stay exactly those of its recorded text, and nothing else is kept of the original.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

from tidegate.gateway.errors import ApiError
from tidegate.gateway.sessions.model_calls import RawBody
from tidegate.gateway.turns.request_reader import LARGE, parse_large
from tidegate.service import exact
from tidegate.tracebacks import where

log = logging.getLogger("tidegate.gateway")
Redaction = Callable[[str], str]
"""Removes personal data from a text. It must return its own results unchanged."""

TEXTS = frozenset(("messages", "input", "instructions", "system", "prompt", "suffix", "metadata", "user"))
"""Fields of a request with the client's texts, in any dialect."""
STRUCTURE = frozenset((
    "type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "status", "signature", "media_type",
    "data", "encrypted_content", "format", "namespace",
))  # fmt: skip
"""Fields of messages and their parts that have no free text. So has `name`, except beside `role`."""
FREE = frozenset(("metadata", "input", "arguments"))
"""Fields with a client's own data: all texts in them are redacted, and the names of their fields."""
FIELDS = STRUCTURE | FREE | frozenset((
    "name", "content", "text", "tool_calls", "function", "reasoning_content", "thinking", "summary", "output",
    "refusal", "function_call", "audio", "is_error", "index",
))  # fmt: skip
"""Known fields of messages and their parts. Others, whose very names may be personal data, are dropped."""
DEEPEST = 200
"""Limit of the nesting of a body; the parser, which runs later, has a lower one."""
LONG_NUMBER = 6
"""Digits from which a number in a client's data may be personal, such as one of a telephone or a card."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|-?\d[\d.eE+-]*', re.DOTALL)
"""A string of JSON, whose end may be cut off, or a number."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)', re.DOTALL)
_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)(\\u[0-9a-fA-F]{4}(?:\\u[0-9a-fA-F]{4})*|\\/)")


def redact_body(body: RawBody, redaction: Redaction) -> bytes:
    """Return a request body with redacted texts.

    A small body that is no JSON object is returned unchanged: it is refused later. Token ids are not
    redacted.

    Raises:
        ApiError: The redaction failed, or the body has too many values or is nested too deeply.
    """
    try:
        value = parse_large(body) if len(body) > LARGE else exact.loads(body)
    except exact.TooDeepError:
        raise _too_deep() from None
    except ValueError:
        return bytes(body)
    if not isinstance(value, dict):
        return bytes(body)
    metadata = value.get("metadata")
    # A changed name would make two conversations of one, or one of two.
    name_of_conversation = metadata.pop("session_id", None) if isinstance(metadata, dict) else None
    for name in value.keys() & TEXTS:
        value[name] = redact_value(value[name], redaction, free=name == "metadata")
    if name_of_conversation is not None:
        value["metadata"]["session_id"] = name_of_conversation
    try:
        return exact.dumps(value)
    except (TypeError, ValueError) as error:
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
        raise _too_deep()
    if isinstance(value, str):
        return redact_text(value, redaction)
    if isinstance(value, list):
        items = value if free else _joined(value, redaction)
        return [redact_value(item, redaction, free=free, depth=depth + 1) for item in items]
    if not isinstance(value, dict):
        return _redact_number(value, redaction) if free else value
    if free:
        return {
            redact_text(name, redaction): redact_value(item, redaction, free=True, depth=depth + 1)
            for name, item in value.items()
        }
    redacted = {}
    for name in value.keys() & FIELDS:
        item = value[name]
        if isinstance(item, str) and name == "arguments":
            item = redact_json(item, redaction)
        elif not isinstance(item, str) or not _is_structure(name, value):
            own = name in FREE and isinstance(item, dict)
            item = redact_value(item, redaction, free=own, depth=depth + 1)
        redacted[name] = item
    # In the order of the body, which a set does not keep: an equal body must be redacted to equal bytes.
    return {name: redacted[name] for name in value if name in redacted}


def _joined(parts: list[Any], redaction: Redaction) -> list[Any]:
    """Returns content parts; adjacent texts over which a text to redact is split are joined."""
    joined: list[Any] = []
    for have_text, group in groupby(parts, _has_text):
        adjacent = list(group)
        if have_text and len(adjacent) > 1:
            text = "".join(part["text"] for part in adjacent)
            apart = "".join(redact_text(part["text"], redaction) for part in adjacent)
            if redact_text(text, redaction) != apart:
                adjacent = [{**adjacent[0], "text": text}]
        joined += adjacent
    return joined


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _too_deep() -> ApiError:
    return ApiError(
        f"the body is nested more than {DEEPEST} levels and cannot be redacted", code="redaction_failed"
    )


def _is_structure(name: str, part: dict[str, Any]) -> bool:
    return name in STRUCTURE or (name == "name" and "role" not in part)


def redact_json(text: str, redaction: Redaction) -> str:
    """Returns a JSON text whose values and names are redacted as they are read, not as they are written.

    A text that is no JSON is redacted as others are. Raises ApiError.
    """
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return redact_text(text, redaction)
    return _TOKEN.sub(lambda token: _redact_token(token[0], redaction), text)


def _redact_token(token: str, redaction: Redaction) -> str:
    """Returns a redacted string or number of JSON; unchanged, as it is written, if its value is."""
    if not token.startswith('"'):
        number = _redact_number(token, redaction)
        return token if number == token else json.dumps(number, ensure_ascii=False)
    closed = len(token) > 1 and token.endswith('"')
    try:
        value = json.loads(token if closed else token.rstrip("\\") + '"', strict=False)
    except ValueError:
        return token
    redacted = redact_text(value, redaction)
    if redacted == value:
        return token
    written = json.dumps(redacted, ensure_ascii=False)
    return written if closed else written[:-1]


def _redact_number(value: Any, redaction: Redaction) -> Any:
    """Returns a number, or the text that is left of one with so many digits that it may be personal."""
    written = str(value)
    if isinstance(value, bool) or sum(map(str.isdigit, written)) < LONG_NUMBER:
        return value
    redacted = redact_text(written, redaction)
    return value if redacted == written else redacted


def redact_text(text: str, redaction: Redaction) -> str:
    """Return a redacted text, also where JSON's escapes hide what is to be redacted.

    Raises ApiError, without the text, if the redaction fails.
    """
    text = _call(redaction, text)
    if "\\" not in text:
        return text
    text = _STRING.sub(
        lambda token: _redact_token(token[0], redaction) if "\\" in token[0] else token[0], text
    )
    plain = _ESCAPE.sub(_unescaped, text)
    if plain == text:
        return text
    redacted = _call(redaction, plain)
    return text if redacted == plain else redacted


def _unescaped(escape: re.Match[str]) -> str:
    """Returns the characters of JSON escapes; unchanged where they cannot be part of a JSON string."""
    if escape[2] == "\\/":
        return f"{escape[1]}/"
    characters: str = json.loads(f'"{escape[2]}"')
    plain = characters.isprintable() and not set('"\\') & set(characters)
    return escape[1] + (characters if plain else escape[2])


def _call(redaction: Redaction, text: str) -> str:
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
