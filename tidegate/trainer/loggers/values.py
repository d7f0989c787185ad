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


def public_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that cannot contain secrets: no gateway settings, options or engine URLs."""
    return settings.model_dump(
        mode="json",
        exclude={"gateway": True, "agent": {"options"}, "env": {"options"}, "engine": {"urls"}},
    )


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings by their full name, as `trainer.loss.name`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
