"""Validates values of a JSON body; errors name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tidegate.errors import TidegateError


class RequestError(TidegateError):
    """Raised for an invalid request (status 400); the message names the field."""


PARAMS = "sampling_params."
"""Prefix of sampling parameters in error messages."""


def number(fields: dict[str, Any], name: str, default: float) -> float:
    value = fields.pop(name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise invalid_parameter(name, value, "it must be a number")
    return float(value)


def integer(fields: dict[str, Any], name: str, default: int, prefix: str = PARAMS) -> int:
    value = fields.pop(name, None)
    if value is None:
        return default
    if type(value) is not int or abs(value) >= 2**62:
        raise RequestError(f"{prefix}{name} = {value!r}: it must be an integer")
    return value


def boolean(fields: dict[str, Any], name: str, default: bool, prefix: str) -> bool:
    value = fields.pop(name, None)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{prefix}{name} = {value!r}: it must be true or false")
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is not a JSON object")
    return value


def refuse_unsupported(
    fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str
) -> None:
    for name, value in fields.items():
        if name not in neutral:
            raise RequestError(f"{prefix}{name} is not a parameter of this engine")
        if value not in neutral[name]:
            raise RequestError(f"{prefix}{name} = {value!r} is not supported by this engine; leave it out")


def invalid_parameter(name: str, value: Any, rule: str) -> RequestError:
    return RequestError(f"{PARAMS}{name} = {value!r}: {rule}")
