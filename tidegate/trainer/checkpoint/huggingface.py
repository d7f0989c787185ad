"""Models in Hugging Face format on disk: read to be trained, and written so that engines can serve them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from errno import EIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from tidegate.errors import StartError
from tidegate.trainer.checkpoint.checkpoint import sync_tree
from tidegate.weights import checksum

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
"""What a base model's directory holds besides weights and configs that an engine needs."""


def read_model(path: Path) -> Any:
    """A causal LM in float32. Raises StartError where the directory holds none that can be loaded."""
    if not (path / "config.json").is_file():
        raise StartError(f"{path}: no model there (no config.json); model.path is a Hugging Face directory")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StartError(f"{path}: cannot load a causal language model: {error}") from error
    if info["missing_keys"]:
        # transformers makes random ones and says so in passing.
        raise StartError(f"{path}: these weights are missing: {', '.join(sorted(info['missing_keys']))}")
    return model


def tokenizer_files(base: Path) -> dict[str, bytes]:
    """The base model's tokenizer files by relative path. Held in memory (some MB at most), because a
    resumed run starts from a checkpoint that is removed while it goes on."""
    found = [path for pattern in TOKENIZER_FILES for path in base.glob(pattern)]
    files = [one for path in found for one in ([path] if path.is_file() else path.rglob("*"))]
    return {str(path.relative_to(base)): path.read_bytes() for path in files if path.is_file()}


def write_model(
    directory: Path, model: Any, values: dict[str, Tensor], files: Mapping[str, bytes], *, durable: bool
) -> None:
    """Write the model with these values, their checksum and files beside its place, and rename it when it
    is complete.

    What was there before is replaced. `durable` also waits until it is on disk. Raises OSError.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_tensors(partial, model, values)
        checksum.write(partial)
        for name, content in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        if durable:
            sync_tree(partial)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tensors(directory: Path, model: Any, values: dict[str, Tensor]) -> None:
    try:
        model.save_pretrained(directory, state_dict=values)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else EIO, str(error), str(directory)) from error
