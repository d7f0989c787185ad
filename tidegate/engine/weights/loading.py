"""Replacing the live weights: everything is read and checked before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from tidegate.weights import checksum
from tidegate.weights.files import WeightsError, weight_files

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Pairs (live tensor, new values) that cover the whole model."""

    pairs: list[tuple[Tensor, Tensor]]


def converts_weights(hf_model: Any) -> bool:
    """Whether this family's files hold other tensors than the model (experts one by one, say)."""
    return bool(get_model_conversion_mapping(hf_model, add_legacy=False))


def read_weights(hf_model: Any, directory: Path) -> CheckedWeights:
    """Read a directory of safetensors and check names, shapes and types against the live model, and the
    bytes against the checksum that was kept of them, if one was.

    Raises WeightsError, which names the file or the tensor.
    """
    files = weight_files(directory)
    if converts_weights(hf_model):
        weights = _read_converted(hf_model, directory)
    else:
        weights = _read(hf_model, directory, files)
    fault = checksum.fault_of(directory)
    if fault is not None:
        raise WeightsError(fault)
    return weights


def _read(hf_model: Any, directory: Path, files: list[Path]) -> CheckedWeights:
    with ExitStack() as stack:
        return check_weights(
            hf_model, ((path, *one) for path in files for one in _tensors(path, stack)), directory
        )


def check_weights(
    hf_model: Any, tensors: Iterable[tuple[Path | str, str, Tensor]], whole: Path | str = "what was sent"
) -> CheckedWeights:
    """Tensors, each (where it is from, name, values), against the live model's names, shapes and types.

    `whole` is what all of them are from. Raises WeightsError, which names the place and the tensor.
    """
    if converts_weights(hf_model):
        raise WeightsError(f"{whole}: its files hold other tensors than the model: load a directory")
    names_of = _live_tensors(hf_model)
    targets = {name: tensor for names, tensor in names_of for name in names}
    found: dict[str, Tensor] = {}
    for where, name, tensor in tensors:
        if name in found:
            raise WeightsError(f"{where}: the tensor {name!r} is in another file too")
        if name in targets:
            _check(where, name, tensor, targets[name])
            found[name] = tensor
        elif not _ignored(hf_model, name):
            raise WeightsError(f"{where}: the model has no tensor {name!r}")
    pairs = []
    for names, tensor in names_of:
        values = [found[name] for name in names if name in found]
        if not values:
            raise WeightsError(f"{whole}: the tensor {names[0]!r} is missing")
        if any(not torch.equal(values[0], other) for other in values[1:]):
            raise WeightsError(f"{whole}: {names} are tied in the model, but differ here")
        pairs.append((tensor, values[0]))
    return CheckedWeights(pairs)


def _read_converted(hf_model: Any, directory: Path) -> CheckedWeights:
    """Let transformers convert the files' tensors, into a second model."""
    try:
        fresh, found = type(hf_model).from_pretrained(
            directory,
            config=hf_model.config,
            dtype=hf_model.dtype,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise WeightsError(f"{directory}: the weights cannot be read: {error}") from error
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found.get(fault):
            names = sorted(map(str, found[fault]))
            raise WeightsError(f"{directory}: {fault.replace('_', ' ')}: {', '.join(names[:5])}")
    new = fresh.state_dict()
    return CheckedWeights([(tensor, new[names[0]]) for names, tensor in _live_tensors(hf_model)])


@torch.no_grad()
def copy_weights(weights: CheckedWeights) -> None:
    """Make them live, in place."""
    for live, new in weights.pairs:
        live.copy_(new)


def _live_tensors(hf_model: Any) -> list[tuple[list[str], Tensor]]:
    """Every tensor of the model with its names: tied tensors have several."""
    by_storage: dict[tuple[int, tuple[int, ...]], tuple[list[str], Tensor]] = {}
    for name, tensor in hf_model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        by_storage.setdefault(key, ([], tensor))[0].append(name)
    return list(by_storage.values())


def _tensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, Tensor]]:
    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file: {error}") from None


def _check(path: Path | str, name: str, new: Tensor, live: Tensor) -> None:
    if new.shape != live.shape:
        raise WeightsError(f"{path}: {name!r} has shape {list(new.shape)}, the model {list(live.shape)}")
    if new.dtype != live.dtype and not (new.dtype in FLOATS and live.dtype in FLOATS):
        raise WeightsError(f"{path}: {name!r} has type {new.dtype}, the model {live.dtype}")


def _ignored(hf_model: Any, name: str) -> bool:
    patterns = getattr(hf_model, "_keys_to_ignore_on_load_unexpected", None) or []
    return any(re.search(pattern, name) for pattern in patterns)
