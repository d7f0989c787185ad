"""Lists the safetensors of a Hugging Face model directory; importable without torch."""

from __future__ import annotations

import json
from pathlib import Path

from tidegate.errors import TidegateError

INDEX_FILE = "model.safetensors.index.json"
"""Index of a model with several files."""


class WeightsError(TidegateError):
    """Weights are missing or belong to another model; nothing was changed."""


def weight_files(directory: Path) -> list[Path]:
    """Return the files in order of name. Raises WeightsError if there are none or one is missing."""
    if not directory.is_dir():
        raise WeightsError(f"{directory}: there is no such directory")
    index = directory / INDEX_FILE
    if not index.is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise WeightsError(f"{directory} has no *.safetensors file")
        return paths
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = sorted(directory / name for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not a safetensors index: {error!r}") from None
    if not paths:
        raise WeightsError(f"{index} names no file")
    for path in paths:
        if not path.is_file():
            raise WeightsError(f"{path}: named by {INDEX_FILE}, but missing")
    return paths
