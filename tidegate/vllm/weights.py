"""Weights are looked at before vLLM sees them: it warns of tensors that are missing and goes on with the old
ones, and what it makes of others it finds out half-way."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from tidegate.weights import checksum
from tidegate.weights.files import WeightsError, weight_files

TIED = "lm_head.weight"
"""Need not be there where it is the embedding again."""
NAMED = 5

Manifest = dict[str, tuple[int, ...]]
"""A tensor's name: its shape."""


def manifest(directory: Path) -> Manifest:
    """What a directory of safetensors has. Only the files' heads are read, which tell how long a file is.

    Raises WeightsError where a file is missing, cut short, or no safetensors.
    """
    found: Manifest = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    found[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: not a whole safetensors file: {error}") from None
    return found


def check(directory: Path, served: Manifest, *, tied: bool) -> None:
    """Raises WeightsError where the directory has other tensors than the model that is served, or other
    bytes than those whose checksum was kept with it."""
    found = manifest(directory)
    optional = {TIED} if tied else set()
    for what, names in (
        ("has no", served.keys() - found.keys() - optional),
        ("has, and the model has not,", found.keys() - served.keys() - optional),
    ):
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise WeightsError(f"{directory} {what} {', '.join(sorted(names)[:NAMED])}{more}")
    for name in found.keys() & served.keys():
        if found[name] != served[name]:
            shapes = f"{list(found[name])}, the model {list(served[name])}"
            raise WeightsError(f"{directory}: {name!r} has shape {shapes}")
    fault = checksum.find_damage(directory)
    if fault is not None:
        raise WeightsError(fault)
