"""Values of a JSON body, checked; what is wrong is named in the words of the caller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tidegate.errors import TidegateError


class RequestError(TidegateError):
    """A request that is refused (400); the message names the field."""


PARAMS = "sampling_params."
"""What stands before the names of sampling parameters."""


def number(rest: dict[str, Any], name: str, default: float) -> float:
    value = rest.pop(name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise refusal(name, value, "it is a number")
    return float(value)


def integer(rest: dict[str, Any], name: str, default: int) -> int:
    value = rest.pop(name, None)
    if value is None:
        return default
    if type(value) is not int or abs(value) >= 2**62:
        raise refusal(name, value, "it is an integer")
    return value


def boolean(rest: dict[str, Any], name: str, default: bool, prefix: str) -> bool:
    value = rest.pop(name, None)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{prefix}{name} = {value!r}: it is true or false")
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is not a JSON object")
    return value


def refuse_rest(rest: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    for name, value in rest.items():
        if name not in neutral:
            raise RequestError(f"{prefix}{name} is not a parameter that this engine knows")
        if value not in neutral[name]:
            raise RequestError(f"{prefix}{name} = {value!r} is not supported by this engine; leave it out")


def refusal(name: str, value: Any, rule: str) -> RequestError:
    return RequestError(f"{PARAMS}{name} = {value!r}: {rule}")
