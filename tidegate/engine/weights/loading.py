"""Weight updates from files: all files are read and checked before the live weights are changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from tidegate.weights import checksum, delta_files
from tidegate.weights.adapter_files import DOWN, PREFIX, UP, AdapterHeader
from tidegate.weights.files import WeightsError, weight_files
from tidegate.weights.process_group import bytes_of

Matrices: TypeAlias = "dict[torch.nn.Linear, tuple[Tensor, Tensor]]"
"""For each layer with a LoRA adapter, Aᵀ [inputs, rank] and (α ÷ r) · Bᵀ [rank, outputs]."""
RECEIVED = "the received weights"
"""Name of weights without files in error messages."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Pairs (live tensor, new values) that cover the whole model, or none, and all LoRA adapters by name."""

    pairs: list[tuple[Tensor, Tensor]]
    adapters: dict[str, Matrices] = field(default_factory=dict)
    directory: Path | None = None
    """Directory of the whole model; None without one."""


def converts_weights(hf_model: Any) -> bool:
    """Returns whether this family's files hold other tensors than the model (single experts, say)."""
    return bool(get_model_conversion_mapping(hf_model, add_legacy=False))


def read_weights(hf_model: Any, directory: Path) -> CheckedWeights:
    """Reads a directory of safetensors, or of a difference, and checks names, shapes and types against the
    live model, and the bytes against their checksum, if there is one.

    Raises WeightsError, which names the file or the tensor.
    """
    if delta_files.is_delta(directory):
        return _read_delta(hf_model, directory)
    files = weight_files(directory)
    if converts_weights(hf_model):
        weights = _read_converted(hf_model, directory)
    else:
        with ExitStack() as stack:
            tensors = ((path, *item) for path in files for item in _tensors(path, stack))
            weights = check_weights(hf_model, tensors, directory)
    fault = checksum.find_damage(directory)
    if fault is not None:
        raise WeightsError(fault)
    return replace(weights, directory=directory)


def read_adapter(hf_model: Any, header: AdapterHeader) -> Matrices:
    """Reads the matrices of a LoRA adapter, in the type of the layers that they belong to.

    Raises WeightsError, which names the file and the layer.
    """
    layers = {name: one for name, one in hf_model.named_modules() if isinstance(one, torch.nn.Linear)}
    with ExitStack() as stack:
        tensors = dict(_tensors(header.file, stack))
    matrices: Matrices = {}
    for key, down in tensors.items():
        name = key.removeprefix(PREFIX).removesuffix(DOWN)
        if key.endswith(UP) and key.removesuffix(UP) + DOWN in tensors:
            continue
        up = tensors.get(key.removesuffix(DOWN) + UP)
        if name not in layers or up is None:
            raise WeightsError(
                f"{header.file}: {key!r} is not a matrix of a pair of one of the model's layers"
            )
        layer = layers[name]
        if (down.shape[1:], up.shape) != ((layer.in_features,), (layer.out_features, down.shape[0])):
            raise WeightsError(
                f"{header.file}: {name!r} has the matrices {list(down.shape)} and {list(up.shape)}, expected "
                f"[rank, {layer.in_features}] and [{layer.out_features}, rank]"
            )
        pair = down.t().to(layer.weight), (header.scale * up.t().float()).to(layer.weight)
        if not all(bool(one.isfinite().all()) for one in pair):  # 0 · NaN would spoil rows of other adapters
            raise WeightsError(f"{header.file}: the matrices of {name!r} have values that are not finite")
        matrices[layer] = pair
    return matrices


def check_weights(
    hf_model: Any, tensors: Iterable[tuple[Path | str, str, Tensor]], source: Path | str = RECEIVED
) -> CheckedWeights:
    """Checks tensors (origin, name, values) against the live model's names, shapes and types.

    `source` names the whole set. Raises WeightsError, which names the origin and the tensor.
    """
    if converts_weights(hf_model):
        raise WeightsError(
            f"{source}: this model family stores other tensors than the model has; load a directory"
        )
    names_of = _live_tensors(hf_model)
    targets = {name: tensor for names, tensor in names_of for name in names}
    received: dict[str, Tensor] = {}
    for where, name, tensor in tensors:
        if name in received:
            raise WeightsError(f"{where}: the tensor {name!r} is also in another file")
        if name in targets:
            _check(where, name, tensor, targets[name])
            received[name] = tensor
        elif not _ignored(hf_model, name):
            raise WeightsError(f"{where}: the model has no tensor {name!r}")
    pairs = []
    for names, tensor in names_of:
        values = [received[name] for name in names if name in received]
        if not values:
            raise WeightsError(f"{source}: the tensor {names[0]!r} is missing")
        if any(not torch.equal(values[0], other) for other in values[1:]):
            raise WeightsError(f"{source}: {names} are tied in the model, but their values differ")
        pairs.append((tensor, values[0]))
    return CheckedWeights(pairs)


def _read_delta(hf_model: Any, directory: Path) -> CheckedWeights:
    """Applies a difference to the live weights, or to files if these are of another version."""
    live = live_bytes(hf_model)
    tensors = delta_files.restore(directory, live)
    return check_weights(hf_model, restored_tensors(hf_model, tensors, directory), directory)


def live_bytes(hf_model: Any) -> dict[str, delta_files.VersionTensor]:
    """Returns the live parameters; of tied ones only the first."""
    return {
        name: delta_files.VersionTensor(bytes_of(value), value.element_size())
        for name, value in hf_model.named_parameters()
    }


def restored_tensors(
    hf_model: Any, tensors: Mapping[str, delta_files.VersionTensor], source: Path | str
) -> Iterator[tuple[Path | str, str, Tensor]]:
    """Yields the model's tensors, with the values of a version where it has them.

    Raises WeightsError if a tensor of the version has another size or type.
    """
    missing = tensors.keys() - dict(hf_model.named_parameters()).keys()
    if missing:
        raise WeightsError(f"{source}: the model has no parameter {min(missing)!r}")
    for names, tensor in _live_tensors(hf_model):
        item = next((tensors[name] for name in names if name in tensors), None)
        if item is None:
            yield source, names[0], tensor
            continue
        if item.data.size != tensor.numel() * tensor.element_size():
            raise WeightsError(
                f"{source}: {names[0]!r} has {item.data.size} bytes, expected {tensor.nbytes}; the engine "
                "needs the data type of the published weights (engine.dtype)"
            )
        values = torch.from_numpy(np.ascontiguousarray(item.data)).view(tensor.dtype)
        yield source, names[0], values.reshape(tensor.shape)


def _read_converted(hf_model: Any, directory: Path) -> CheckedWeights:
    """Loads a second model, so that transformers converts the tensors of the files."""
    try:
        fresh, loading_info = type(hf_model).from_pretrained(
            directory,
            config=hf_model.config,
            dtype=hf_model.dtype,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise WeightsError(f"{directory}: the weights cannot be read: {error}") from error
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if loading_info.get(fault):
            names = sorted(map(str, loading_info[fault]))
            raise WeightsError(f"{directory}: {fault.replace('_', ' ')}: {', '.join(names[:5])}")
    new = fresh.state_dict()
    return CheckedWeights([(tensor, new[names[0]]) for names, tensor in _live_tensors(hf_model)])


@torch.no_grad()
def copy_weights(weights: CheckedWeights) -> None:
    for live, new in weights.pairs:
        live.copy_(new)


def _live_tensors(hf_model: Any) -> list[tuple[list[str], Tensor]]:
    """Returns every tensor of the model with its names; tied tensors have several."""
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
        raise WeightsError(f"{path}: not a complete safetensors file: {error}") from None


def _check(path: Path | str, name: str, new: Tensor, live: Tensor) -> None:
    if new.shape != live.shape:
        raise WeightsError(f"{path}: {name!r} has shape {list(new.shape)}, expected {list(live.shape)}")
    if new.dtype != live.dtype and not (new.dtype in FLOATS and live.dtype in FLOATS):
        raise WeightsError(f"{path}: {name!r} has type {new.dtype}, expected {live.dtype}")


def _ignored(hf_model: Any, name: str) -> bool:
    patterns = getattr(hf_model, "_keys_to_ignore_on_load_unexpected", None) or []
    return any(re.search(pattern, name) for pattern in patterns)
