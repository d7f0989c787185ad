"""Reads and writes models in Hugging Face format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import EIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from tidegate.errors import StartError
from tidegate.trainer.checkpoint.checkpoint import sync_tree
from tidegate.weights import adapter_files, checksum
from tidegate.weights.files import INDEX_FILE, find_quantization, replacing

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
)
"""Files of a base model, besides weights and configs, that an engine needs."""


def read_model(path: Path) -> Any:
    """Load a causal LM in float32. Raises StartError if the directory holds no loadable one."""
    if not (path / "config.json").is_file():
        raise StartError(
            f"{path}: no model found (no config.json); set model.path to a Hugging Face directory"
        )
    if quantization := find_quantization(path):
        # On a GPU transformers would return them as they are, beside scales that no optimiser knows.
        raise StartError(f"{quantization} and cannot be trained; set model.path to the model in bfloat16")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StartError(f"{path}: cannot load a causal language model: {error}") from error
    if info["missing_keys"]:
        # transformers initialises them randomly and only logs it.
        raise StartError(f"{path}: these weights are missing: {', '.join(sorted(info['missing_keys']))}")
    return model


def empty_model(path: Path) -> Any:
    """Build the model that `read_model` loads on the meta device: without values."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tokenizer_files(base: Path) -> dict[str, bytes]:
    """Read the base model's tokenizer files, by relative path.

    They are kept in memory (some MB at most), as a resumed run's base is a checkpoint that is removed later.
    """
    paths = [path for pattern in TOKENIZER_FILES for path in base.glob(pattern)]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    return {str(file.relative_to(base)): file.read_bytes() for file in files if file.is_file()}


def write_model(
    directory: Path, model: Any, values: dict[str, Tensor], files: Mapping[str, bytes], *, durable: bool
) -> None:
    """Write a model's values, their checksum and other files, replacing `directory` when complete.

    `durable` also syncs the files to disk. Raises OSError.
    """
    with replacing(directory) as partial:
        _write_tensors(partial, model, values)
        _write_dtype(partial / "config.json", values)
        checksum.write(partial)
        for name, content in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        if durable:
            sync_tree(partial)


@torch.no_grad()
def write_merged(adapter: Path, directory: Path) -> None:
    """Write the model that a published LoRA adapter and its base are, in float32.

    Raises WeightsError, OSError, StartError.
    """
    header = adapter_files.read_header(adapter)
    header.check_base()
    model = read_model(header.base)
    matrices = {name: value.float() for name, value in load_file(header.file).items()}
    for name in matrices:
        layer = name.removesuffix(adapter_files.DOWN)
        if layer != name:
            weight = model.get_parameter(f"{layer.removeprefix(adapter_files.PREFIX)}.weight")
            weight += header.scale * (matrices[layer + adapter_files.UP] @ matrices[name])
    write_model(directory, model, model.state_dict(), tokenizer_files(header.base), durable=False)


def kept_exact(model: Any) -> set[str]:
    """Return the names of tensors that engines hold in float32, whatever the type of the others.

    These are buffers and what transformers keeps so. A router's correction bias is one: its values are close
    to each other, and rounded ones choose other experts.
    """
    names = set(model.state_dict())
    kept = {name for name, _ in model.named_buffers()}
    for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ():
        kept |= {name for name in names if re.search(pattern.replace("*", ".*"), name)}
    return kept & names


def cast(values: Mapping[str, Tensor], dtype: str, exact: Collection[str] = frozenset()) -> dict[str, Tensor]:
    """Convert tensors of floats to a data type, but not those named in `exact`.

    Tied ones, which share memory, stay tied.
    """
    kind = getattr(torch, dtype)
    made: dict[tuple[int, torch.Size], Tensor] = {}
    result = {}
    for name, value in values.items():
        key = (value.data_ptr() or id(value), value.shape)  # a shard or a meta tensor has no address
        if name in exact:
            result[name] = value
            continue
        if value.is_floating_point() and value.dtype != kind and key not in made:
            made[key] = value.to(kind)
        result[name] = made.get(key, value)
    return result


def as_in_files(model: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors under the names and shapes that its files have, such as single experts.

    The values need not be of the whole model, but of whole units (`conversion_units`).
    """
    # transformers fuses experts into one tensor when it reads a model; files have them singly.
    return revert_weight_conversion(model, values) if values else {}


def conversion_units(model: Any, live: Mapping[str, Tensor]) -> Callable[[str], str]:
    """Return the key of tensors that only together can be converted to those of files; else their own name.

    `live` are the model's tensors, of which the values are not read.
    """
    meta = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in live.items()}
    shapes = {name: value.shape for name, value in as_in_files(model, meta).items()}

    def alone(name: str) -> bool:
        try:
            found = as_in_files(model, {name: meta[name]})
        except (RuntimeError, ValueError, LookupError):
            return False
        return all(shapes.get(name) == value.shape for name, value in found.items())

    together = {name for name in meta if not alone(name)}
    return lambda name: "converted together" if name in together else name


def _write_dtype(path: Path, values: Mapping[str, Tensor]) -> None:
    """Write the data type of most of the values to a config, where transformers writes the model's.

    Engines that start from the files take their type from there.
    """
    sizes: dict[str, int] = {}
    for value in values.values():
        if value.is_floating_point():
            name = str(value.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + value.nbytes
    if not sizes:
        return
    dtype = max(sizes, key=sizes.__getitem__)
    config = json.loads(path.read_text())
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if isinstance(part.get("dtype"), str):
            part["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_tensors(directory: Path, model: Any, values: dict[str, Tensor]) -> None:
    with _os_errors(directory):
        model.save_pretrained(directory, state_dict=values)


def write_shards(directory: Path, shards: Iterable[dict[str, Tensor]], count: int) -> None:
    """Write the weights of a model as `count` files with an index. Raises OSError."""
    files: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        with _os_errors(directory):
            save_file(tensors, directory / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (directory / INDEX_FILE).write_text(json.dumps(index))


@contextmanager
def _os_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        # safetensors names the system's error in its text alone; callers tell a full disk by its number.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else EIO, str(error), str(directory)) from error
