"""The safetensors of a Hugging Face model directory, and their transfer's time limit; needs no torch."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

from tidegate.errors import TidegateError

INDEX_FILE = "model.safetensors.index.json"
"""Index of a model with several files."""
ADAPTER_CONFIG = "adapter_config.json"
"""Config of a LoRA adapter, which is beside its matrices alone."""
SLOWEST_BYTES_S = 50e6
"""Lowest accepted transfer rate, in bytes per second; fast networks and disks are ten times faster."""


class WeightsError(TidegateError):
    """Weights are missing or belong to another model; nothing was changed."""


def transfer_s(size: int) -> float:
    """Return the seconds that the transfer of so many bytes may take."""
    return size / SLOWEST_BYTES_S


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yield a directory beside `directory`, which it replaces when the block ends without an error."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds a LoRA adapter, or a directory with one for each of several names.

    A whole model may have adapters in its subdirectories, too.
    """
    whole = (directory / "config.json").is_file()
    return (directory / ADAPTER_CONFIG).is_file() or (
        not whole and any(directory.glob(f"*/{ADAPTER_CONFIG}"))
    )


def weight_files(directory: Path) -> list[Path]:
    """Return the files in order of name. Raises WeightsError if there are none or one is missing."""
    if not directory.is_dir():
        raise WeightsError(f"{directory}: there is no such directory")
    if is_adapter(directory):
        raise WeightsError(f"{directory} holds a LoRA adapter, and not a whole model")
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


def find_quantization(directory: Path) -> str | None:
    """Describe the quantization of a model directory by its config; None without one."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        parts = [config, *(part for part in config.values() if isinstance(part, dict))]
        found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    except (OSError, ValueError, AttributeError):
        return None
    if found is None:
        return None
    method = found.get("quant_method", found) if isinstance(found, dict) else found
    return f"the weights of {directory} are quantized (quantization_config in config.json: {method})"


def stored_names(directory: Path) -> set[str]:
    """Return the names of the tensors in a directory's safetensors. Raises WeightsError."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in weight_files(directory):
        with safe_open(path, framework="np") as file:
            names.update(file.keys())
    return names


def stored_parameters(directory: Path) -> int | None:
    """Counts the parameters in a directory's safetensors by their headers (8 bytes of length, then JSON).

    Returns None if there are no safetensors. Raises WeightsError if one is missing or incomplete.
    """
    if not any(directory.glob("*.safetensors")):
        return None
    whole = directory / "model.safetensors"  # some publish the same weights in another layout beside it
    total = 0
    for file in [whole] if whole.is_file() else weight_files(directory):
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(length, file.stat().st_size)))
            tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
            end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
            total += sum(prod(tensor["shape"]) for tensor in tensors)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise WeightsError(f"{file}: its header is damaged or incomplete; fetch the file again") from None
        if end != (size := file.stat().st_size):
            raise WeightsError(
                f"{file} has {size:,} bytes, by its header {end:,}: it was downloaded in part; fetch it again"
            )
    return total
