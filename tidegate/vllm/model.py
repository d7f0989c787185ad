"""Reads a model directory's configuration, and validates weights before vLLM loads them.

vLLM keeps old tensors in place of missing ones, and detects other faults only when the weights are partly
loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tidegate.errors import StartError
from tidegate.weights import checksum
from tidegate.weights.files import WeightsError, weight_files

TIED = "lm_head.weight"
"""Optional if it is tied to the embedding."""
PART = re.compile(r"(?:^|.*\.)(?:mtp|mtp_layers|visual|vision_tower)\.")
"""Prefix of tensors that predict further tokens or read images; the trainer's class may not load them."""
LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)\.")
NAMED = 5

Manifest = dict[str, tuple[int, ...]]
"""Shape by tensor name."""


class ModelFiles:
    """`config.json` and `generation_config.json`. Raises StartError if the first is missing or invalid."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._config = _read(directory / "config.json")
        self._text: Mapping[str, Any] = self._config.get("text_config") or self._config

    @property
    def vocab_size(self) -> int:
        """Raises StartError if it is missing: an id beyond the vocabulary can crash vLLM."""
        size = self._text.get("vocab_size")
        if type(size) is not int:
            raise StartError(f"{self.directory}/config.json has no vocab_size")
        return size

    @property
    def max_context(self) -> int:
        """Raises StartError if it is missing."""
        size = self._text.get("max_position_embeddings")
        if type(size) is not int:
            raise StartError(f"{self.directory}/config.json has no max_position_embeddings")
        return size

    @property
    def tied(self) -> bool:
        return self._text.get("tie_word_embeddings", self._config.get("tie_word_embeddings")) is True

    def part(self, name: str) -> str | None:
        """Return the part of the model to which a tensor belongs; None for the decoder.

        Some families keep the layers that predict further tokens after those of the decoder.
        """
        if found := PART.match(name):
            return found[0]
        layer, count = LAYER.match(name), self._text.get("num_hidden_layers")
        return layer[0] if layer and type(count) is int and int(layer[1]) >= count else None

    @property
    def eos_ids(self) -> frozenset[int]:
        path = self.directory / "generation_config.json"
        values = [self._text.get("eos_token_id"), _read(path).get("eos_token_id") if path.is_file() else None]
        return frozenset(
            id_
            for value in values
            for id_ in (value if isinstance(value, list) else [value])
            if id_ is not None
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"{path}: not a JSON object")
    return value


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


def check_weights(directory: Path, served: Manifest, model: ModelFiles) -> None:
    """Raises WeightsError if the tensors differ from the served model's, or a checksum does not match.

    Parts besides the decoder may be missing as a whole: vLLM keeps those of the base model, which the trainer
    does not train, or does not load them either.
    """
    tensors = manifest(directory)
    there = {model.part(name) for name in tensors}
    optional = {name for name in served if model.part(name) not in {None, *there}}
    optional |= {TIED} if model.tied else set()
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
