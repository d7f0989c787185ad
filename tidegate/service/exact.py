"""JSON and MessagePack without changed values: integers keep their value at any size.

orjson reads integers beyond 64 bits as floats and writes none, and MessagePack has none. msgspec reads and
writes them in JSON at about orjson's speed, up to 4300 digits. In MessagePack they become an extension type.

orjson reads 1,024 levels and writes 254, and received or sampled JSON is written again inside other JSON. The
limits of nesting here stay well below both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import orjson

EXACT = 2**53
"""Below it float64 represents every integer."""
MAX_LEVELS = 100
"""Levels of a tool call's arguments, received or sampled."""
_BIG_INTEGER = 1
"""Code of the MessagePack extension; its data are the decimal digits."""
_decoder = msgspec.json.Decoder()


class TooDeepError(ValueError):
    """JSON is nested deeper than the interpreter's stack."""


def loads(text: str | bytes | bytearray | memoryview) -> Any:
    """Parses JSON. Raises ValueError if it is invalid, or has a number that no float and no integer of 4300
    digits can hold, and TooDeepError."""
    try:
        return _decoder.decode(text)
    except RecursionError:
        raise TooDeepError("it is nested too deeply") from None


def loads_strictly(line: bytes) -> Any:
    """Parses JSON of a file as `loads` does. Raises ValueError also for a key that occurs twice in an object,
    and TooDeepError."""
    try:
        value = json.loads(
            line, parse_constant=no_constant, parse_float=finite_float, object_pairs_hook=distinct
        )
    except RecursionError:
        raise TooDeepError("it is nested too deeply") from None
    if b"\\ud" in line.lower():
        _check_characters(value)
    return value


def no_constant(name: str) -> Any:
    """Raises ValueError for `NaN` and `Infinity`, for Python's json (`parse_constant`)."""
    raise ValueError(f"{name} is not a JSON number")


def finite_float(text: str) -> float:
    """Returns a number, for Python's json (`parse_float`). Raises ValueError if it is too large."""
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:60]} is too large for a floating-point number")
    return number


def _check_characters(value: Any) -> None:
    """Raises ValueError for a lone surrogate, which cannot be encoded as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = json.dumps(error.object[error.start])
        raise ValueError(f"{surrogate} is a lone surrogate, not a character") from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object as a dict, for Python's json (`object_pairs_hook`). Raises ValueError for a key
    that occurs twice, of which other readers keep one value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} occurs twice")
    return values


def dumps(value: Any, option: int | None = None, default: Callable[[Any], Any] | None = None) -> bytes:
    """Returns compact JSON; `option` and `default` are orjson's. Raises TypeError or ValueError for values
    that have no form in JSON."""
    try:
        return orjson.dumps(value, default, option)
    except orjson.JSONEncodeError:  # perhaps for an integer of more than 64 bits
        order: Any = "sorted" if (option or 0) & orjson.OPT_SORT_KEYS else None
        try:
            return msgspec.json.encode(value, enc_hook=partial(_converted, default), order=order)
        except RecursionError:
            raise ValueError("the value is nested too deeply") from None


def too_deep(value: Any, max_levels: int = MAX_LEVELS) -> bool:
    """Returns whether a JSON value has more than `max_levels` levels of lists and objects."""
    level = _containers([value])
    for _ in range(max_levels):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in _containers(outer.values() if type(outer) is dict else outer)
        ]
    return bool(level)


def _containers(values: Any) -> list[Any]:
    return [value for value in values if type(value) is dict or type(value) is list]


def pack(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Returns MessagePack, which `unpack` reads. Raises TypeError or ValueError for other values."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=enc_hook)
    except OverflowError:  # an integer of more than 64 bits
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=enc_hook)
        return msgspec.msgpack.encode(_with_extensions(plain))


def unpack(data: bytes, kind: Any = Any, dec_hook: Callable[[Any, Any], Any] | None = None) -> Any:
    """Reads what `pack` wrote. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=dec_hook, ext_hook=read_extension)


def read_extension(code: int, data: memoryview) -> Any:
    """Returns the value of an extension, for decoders of `pack`'s data."""
    if code != _BIG_INTEGER:
        raise ValueError(f"unknown extension {code} in MessagePack")
    return int(bytes(data))


def _with_extensions(value: Any) -> Any:
    match value:
        case int() if not -(2**63) <= value < 2**64:
            return msgspec.msgpack.Ext(_BIG_INTEGER, str(value).encode())
        case dict():
            return {key: _with_extensions(item) for key, item in value.items()}
        case list() | tuple():
            return [_with_extensions(item) for item in value]
    return value


def _converted(default: Callable[[Any], Any] | None, value: Any) -> Any:
    """Converts arrays and numbers of NumPy, and what `default` converts, for msgspec."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if default is not None:
        return default(value)
    raise TypeError(f"{type(value).__name__} is not serialisable as JSON")
