"""Directories that hold a version as its difference from an earlier one; importable without torch.

A chain of such directories ends at one with all weights. Checksums of the base and of the result make a wrong
base and a damaged difference fail instead of giving other weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tidegate.weights import delta
from tidegate.weights.checksum import MODULUS, Bytes, of_tensor, tensors_of_file
from tidegate.weights.checksum import write as write_checksum
from tidegate.weights.files import WeightsError, replacing, weight_files

FILE = "weights.delta"
"""Safetensors file of encoded differences; its other suffix keeps loaders of whole models away."""
FORMAT = "1"
LONGEST_CHAIN = 1000
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class VersionTensor:
    """A tensor of a version: its values as bytes, and the width of an element in bytes."""

    data: Bytes
    width: int


T = TypeVar("T")
Tensors = Mapping[str, VersionTensor]


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """Header of a difference."""

    path: Path
    base: Path
    base_checksum: int
    checksum: int
    widths: dict[str, int]


def is_delta(directory: Path) -> bool:
    return (directory / FILE).is_file()


def checksum_of(tensors: Tensors) -> int:
    """Return the checksum of a version, as defined in `tidegate.weights.checksum`."""
    return sum(_on_threads(of_tensor, ((name, item.data) for name, item in tensors.items()))) % MODULUS


def encode(olds: Tensors, news: Tensors) -> dict[str, bytes]:
    """Return the encoded difference of each tensor. Raises ValueError if names or sizes differ."""
    if olds.keys() != news.keys():
        raise ValueError(f"tensor names differ: {', '.join(sorted(olds.keys() ^ news.keys())[:5])}")
    pairs = ((olds[name].data, news[name].data, news[name].width) for name in news)
    return dict(zip(news, _on_threads(delta.encode, pairs), strict=True))


def write(
    directory: Path, base: Path, base_checksum: int, checksum: int, news: Tensors, blobs: Mapping[str, bytes]
) -> None:
    """Write a difference; `directory` appears when it is complete. Raises OSError."""
    header = {
        "format": FORMAT, "base": base.name, "base_checksum": str(base_checksum), "checksum": str(checksum),
        "widths": json.dumps({name: item.width for name, item in news.items()}),
    }  # fmt: skip
    arrays = {name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}
    with replacing(directory) as partial_:
        (partial_ / FILE).write_bytes(save(arrays, header))


def read_header(directory: Path) -> DeltaFile:
    """Read a difference's header. Raises WeightsError."""
    path = directory / FILE
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
        if header.get("format") != FORMAT:
            raise WeightsError(f"{path}: format {header.get('format')!r}, this version reads {FORMAT!r}")
        return DeltaFile(
            path, directory.parent / Path(header["base"]).name, int(header["base_checksum"]),
            int(header["checksum"]), json.loads(header["widths"]),
        )  # fmt: skip
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise WeightsError(f"{path}: not a complete difference of weights: {error!r}") from None


def chain(directory: Path) -> list[Path]:
    """Return the directories that a version needs, from itself to the one with all weights.

    Raises WeightsError if a difference cannot be read.
    """
    found = [directory]
    while is_delta(found[-1]):
        found.append(read_header(found[-1]).base)
        if len(found) > LONGEST_CHAIN:
            raise WeightsError(f"{directory}: more than {LONGEST_CHAIN} differences lead to its base")
    return found


def restore(directory: Path, live: Tensors) -> dict[str, VersionTensor]:
    """Return the weights of a version that is stored as a difference.

    Args:
        directory: directory with the difference; its base lies beside it.
        live: weights of some version, used if the chain begins at them; else the base is read from files.

    Raises:
        WeightsError: if a file is missing or damaged, or the result has another checksum.
    """
    own = checksum_of(live)
    steps: list[DeltaFile] = []
    place = directory
    while is_delta(place) and len(steps) < LONGEST_CHAIN:
        steps.append(read_header(place))
        if steps[-1].base_checksum == own and steps[-1].widths.keys() <= live.keys():
            break
        place = steps[-1].base
    if not steps:
        raise WeightsError(f"{directory} has no {FILE}")
    tensors = dict(live) if steps[-1].base_checksum == own else _read_full(steps[-1])
    for step in reversed(steps):
        tensors = _apply(step, tensors)
    return tensors


def materialise(directory: Path, target: Path) -> None:
    """Write a version that is stored as a difference as a directory with all weights.

    If `target` exists, it is an earlier result and serves as the base if the chain leads there.

    Raises WeightsError, OSError.
    """
    full = chain(directory)[-1]
    base = target if target.is_dir() else full
    tensors = restore(directory, read_tensors(base, read_header(directory).widths))
    partial_ = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial_, ignore_errors=True)
    shutil.copytree(base, partial_)
    for path in weight_files(partial_):
        _overwrite(path, tensors)
    write_checksum(partial_)
    shutil.rmtree(target, ignore_errors=True)
    partial_.rename(target)


def _overwrite(path: Path, tensors: Tensors) -> None:
    """Replace the values in a safetensors file."""
    for name, data in tensors_of_file(path, "r+"):
        if name in tensors:
            data[:] = tensors[name].data


def _read_full(step: DeltaFile) -> dict[str, VersionTensor]:
    tensors = read_tensors(step.base, step.widths)
    if checksum_of(tensors) != step.base_checksum:
        raise WeightsError(f"{step.path}: its base {step.base} has other weights than it was computed from")
    return tensors


def read_tensors(directory: Path, widths: Mapping[str, int]) -> dict[str, VersionTensor]:
    """Read the tensors with these names.

    Raises WeightsError if one is missing, or its elements have another width, as those that stay in float32.
    """
    found = {}
    try:
        for path in weight_files(directory):
            with safe_open(path, framework="np") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            for name, data in tensors_of_file(path):
                if name in widths:
                    if data.size != widths[name] * prod(shapes[name]):
                        raise WeightsError(f"{directory}: {name!r} has no elements of {widths[name]} bytes")
                    found[name] = VersionTensor(data, widths[name])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{directory}: cannot read the weights: {error!r}") from error
    if missing := widths.keys() - found.keys():
        raise WeightsError(f"{directory}: the tensor {min(missing)!r} is missing")
    return found


def _apply(step: DeltaFile, olds: Tensors) -> dict[str, VersionTensor]:
    """Apply one difference. Raises WeightsError."""
    try:
        with safe_open(step.path, framework="np") as file:
            blobs = {name: file.get_tensor(name).tobytes() for name in step.widths}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{step.path}: not a complete difference of weights: {error}") from None
    return apply(str(step.path), step.widths, blobs, olds, step.checksum)


def apply(
    source: str, widths: Mapping[str, int], blobs: Mapping[str, bytes], olds: Tensors, checksum: int
) -> dict[str, VersionTensor]:
    """Apply encoded differences to weights. Raises WeightsError if the result has another checksum."""
    jobs = ((olds[name].data, blobs[name], width) for name, width in widths.items())
    try:
        datas = _on_threads(delta.decode, jobs)
    except (WeightsError, ValueError) as error:
        raise WeightsError(f"{source}: {error}") from error
    news = {name: VersionTensor(data, widths[name]) for name, data in zip(widths, datas, strict=True)}
    if checksum_of(news) != checksum:
        raise WeightsError(f"{source}: the result has another checksum: it was damaged or has another base")
    return news


def _on_threads(function: Callable[..., T], arguments: Iterable[tuple[Any, ...]]) -> list[T]:
    """Call a function with each tuple of arguments, on several cores: numpy and zstd release the GIL."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda each: function(*each), arguments))
