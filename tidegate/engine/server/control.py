"""What SGLang's control calls ask for: their bodies, checked. All of these raise RequestError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tidegate.engine.validation import RequestError

Mode = TypeVar("Mode", bound=str)

HEALTH_DEADLINE_S = 20.0
"""How long `/health_generate` waits for a token."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """`/update_weights_from_disk`."""

    directory: Path
    version: str | None
    keep_cache: bool
    abort_all: bool


def read_abort(body: Mapping[str, Any]) -> str:
    """How the ids begin that are to end; empty for all of them."""
    rid = body.get("rid")
    if body.get("abort_all") is True:
        return ""
    if not isinstance(rid, str) or not rid:
        raise RequestError(f"rid = {rid!r}: give the beginning of a request id, or abort_all: true")
    return rid


def read_mode(body: Mapping[str, Any], modes: Sequence[Mode]) -> Mode:
    """How to pause, of the `modes` that there are."""
    asked = body.get("mode", "abort")
    for mode in modes:
        if mode == asked:
            return mode
    raise RequestError(f"mode = {asked!r}: it is one of {', '.join(modes)}")


def read_update(body: Mapping[str, Any]) -> WeightUpdate:
    path = body.get("model_path")
    if not isinstance(path, str) or not path:
        raise RequestError(f"model_path = {path!r}: give a directory of safetensors")
    version = read_version(body.get("weight_version"), "weight_version")
    keep_cache, abort_all = body.get("flush_cache", True) is False, body.get("abort_all_requests") is True
    return WeightUpdate(Path(path), version, keep_cache, abort_all)


def read_relabel(body: Mapping[str, Any]) -> tuple[str, bool]:
    """`/update_weight_version`: the label, and whether all requests end first."""
    version = read_version(body.get("new_version"), "new_version")
    if version is None:
        raise RequestError("new_version: give the label of the weights that are loaded")
    return version, bool(body.get("abort_all_requests", True))


def read_version(value: Any, name: str) -> str | None:
    """A version's label; None where none is given."""
    if value is None or (isinstance(value, str) and value):
        return value
    if type(value) is int:
        return str(value)
    raise RequestError(f"{name} = {value!r}: it is a string that is not empty")
