"""Parses the bodies of SGLang's control calls. All functions raise RequestError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tidegate.engine.validation import RequestError

Mode = TypeVar("Mode", bound=str)

HEALTH_DEADLINE_S = 20.0
"""Timeout of `/health_generate` in seconds."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Parsed body of `/update_weights_from_disk`."""

    directory: Path
    version: str | None
    keep_cache: bool
    abort_all: bool


def read_abort(body: Mapping[str, Any]) -> str:
    """Returns the prefix of the request ids to abort; empty for all requests."""
    rid = body.get("rid")
    if body.get("abort_all") is True:
        return ""
    if not isinstance(rid, str) or not rid:
        raise RequestError(f"rid = {rid!r}: give a prefix of request ids, or abort_all: true")
    return rid


def read_mode(body: Mapping[str, Any], modes: Sequence[Mode]) -> Mode:
    """Returns the pause mode, one of `modes`."""
    requested = body.get("mode", "abort")
    for mode in modes:
        if mode == requested:
            return mode
    raise RequestError(f"mode = {requested!r}: it must be one of {', '.join(modes)}")


def read_update(body: Mapping[str, Any]) -> WeightUpdate:
    path = body.get("model_path")
    if not isinstance(path, str) or not path:
        raise RequestError(f"model_path = {path!r}: give a directory of safetensors")
    version = read_version(body.get("weight_version"), "weight_version")
    keep_cache, abort_all = body.get("flush_cache", True) is False, body.get("abort_all_requests") is True
    return WeightUpdate(Path(path), version, keep_cache, abort_all)


def read_relabel(body: Mapping[str, Any]) -> tuple[str, bool]:
    """Parses `/update_weight_version`: the label, and whether all requests are aborted first."""
    version = read_version(body.get("new_version"), "new_version")
    if version is None:
        raise RequestError("new_version: give the version label of the loaded weights")
    return version, bool(body.get("abort_all_requests", True))


def read_version(value: Any, name: str) -> str | None:
    """Returns a version label, or None if none is given."""
    if value is None or (isinstance(value, str) and value):
        return value
    if type(value) is int:
        return str(value)
    raise RequestError(f"{name} = {value!r}: it must be a non-empty string")
