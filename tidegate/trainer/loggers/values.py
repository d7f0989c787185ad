"""What loggers send: the numbers of a step, and settings without secrets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tidegate.config import Settings


def scalars(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite numbers among the metrics, without `step` and `time`."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name not in ("step", "time") and value is not None and math.isfinite(value)
    }


PRIVATE = ("options", "arguments", "url", "urls")
"""Settings of any section that may contain secrets."""


def public_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that cannot contain secrets: no gateway settings, options, arguments or URLs."""
    return _public(settings.model_dump(mode="json", exclude={"gateway"}))


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _public(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in PRIVATE
    }


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings by their full name, as `trainer.loss.name`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
