"""Name of the argument by which a Hugging Face model takes its key-value cache."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """Return `cache`, or `past_key_values` where transformers is older than 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
