"""Validates weights before vLLM loads them: vLLM keeps old tensors in place of missing ones, and detects
other faults only when the weights are partly loaded."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from tidegate.weights import checksum
from tidegate.weights.files import WeightsError, weight_files

TIED = "lm_head.weight"
"""Optional if it is tied to the embedding."""
NAMED = 5

Manifest = dict[str, tuple[int, ...]]
"""Shape by tensor name."""


def manifest(directory: Path) -> Manifest:
    """The tensors of a directory of safetensors, from the file headers.

    Raises WeightsError if a file is missing, truncated or not safetensors.
    """
    tensors: Manifest = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensors[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: not a whole safetensors file: {error}") from None
    return tensors


def check(directory: Path, served: Manifest, *, tied: bool) -> None:
    """Raises WeightsError if the tensors differ from the served model's, or a checksum does not match."""
    tensors = manifest(directory)
    optional = {TIED} if tied else set()
    for what, names in (
        ("has no", served.keys() - tensors.keys() - optional),
        ("has, and the model has not,", tensors.keys() - served.keys() - optional),
    ):
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise WeightsError(f"{directory} {what} {', '.join(sorted(names)[:NAMED])}{more}")
    for name in tensors.keys() & served.keys():
        if tensors[name] != served[name]:
            shapes = f"{list(tensors[name])}, the model {list(served[name])}"
            raise WeightsError(f"{directory}: {name!r} has shape {shapes}")
    fault = checksum.find_damage(directory)
    if fault is not None:
        raise WeightsError(fault)
