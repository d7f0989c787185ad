"""Directories that hold a version as a LoRA adapter in peft's format; importable without torch.

A safetensors file has the matrices A and B of each layer, a config has rank, scale and the base model's
directory. The checksum of the base model is in the safetensors' metadata: an adapter of another base fails
instead of giving other weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tidegate.weights import checksum
from tidegate.weights.files import ADAPTER_CONFIG, WeightsError, is_adapter

FILE = "adapter_model.safetensors"
BASE_CHECKSUM = "base_checksum"
"""Key of the safetensors' metadata."""
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""peft's names in files: prefix of a layer, and suffixes of A [rank, inputs] and B [outputs, rank]."""
OTHER_SCALES = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias")
"""Entries of the config that change the product; adapters with one of them are refused."""


@dataclass(frozen=True, slots=True)
class AdapterHeader:
    """An adapter's directory, base model and scale.

    Attributes:
        directory: directory of the adapter.
        base: directory of the base model.
        base_checksum: checksum of the base model's files; None if the adapter has none.
        scale: α ÷ r.
    """

    directory: Path
    base: Path
    base_checksum: int | None
    scale: float

    @property
    def file(self) -> Path:
        return self.directory / FILE

    def check_base(self) -> None:
        """Raises WeightsError if the base model's files are missing or others than those of the training."""
        try:
            found = checksum.of_files(self.base)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{self.directory}: cannot read its base model: {error!r}") from error
        if self.base_checksum not in (None, found):
            raise WeightsError(
                f"{self.directory}: its base model {self.base} has the checksum {found}, not "
                f"{self.base_checksum}: the files were replaced since the training; restore them"
            )


def adapter_names(version: object, names: Iterable[str]) -> dict[str, str]:
    """Return the names under which engines serve the adapters of a version: `v12`, of several `v12-NAME`.

    Requests name them. So each token is of the version in the name, whatever the engine has loaded meanwhile.
    """
    return {name: f"v{version}-{name}" if name else f"v{version}" for name in names}


def adapter_label(version: object, names: Collection[str]) -> str:
    """Return the weight version that SGLang reports with these adapters: `v12`, of several `v12-`."""
    return f"v{version}" if "" in names else f"v{version}-"


def split_label(label: str) -> tuple[str, str | None]:
    """Return the version in an engine's label, and the label if requests must name adapters of it."""
    found = re.fullmatch(r"v(\d+)-?", label, re.ASCII)
    return (label, None) if found is None else (found[1], label)


def requested_adapter(label: str | None, name: str) -> str | None:
    """Return the adapter that a request names; None: none.

    Args:
        label: the engine's label, if it has adapters in it (`split_label`); other engines find the adapter
            of their version by `name`.
        name: name of one of several adapters; "" for the only one, or the base model beside several.
    """
    if label is None or not label.endswith("-"):
        return label or name or None
    return label + name if name else None


def read_header(directory: Path) -> AdapterHeader:
    """Read an adapter's config and metadata, and compare the file with its checksum. Raises WeightsError."""
    if damage := checksum.find_damage(directory):
        raise WeightsError(damage)
    # Not at the top: the gateway, which only splits labels, runs without safetensors.
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        with safe_open(directory / FILE, framework="np") as file:
            base_checksum = (file.metadata() or {}).get(BASE_CHECKSUM)
        other = [name for name in OTHER_SCALES if config.get(name)]
        if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or other:
            raise WeightsError(
                f"{directory / ADAPTER_CONFIG}: only plain LoRA is read, without "
                f"{', '.join(other) or 'biases or other types of adapters'}"
            )
        return AdapterHeader(
            directory,
            Path(config["base_model_name_or_path"]),
            None if base_checksum is None else int(base_checksum),
            config["lora_alpha"] / config["r"],
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{directory}: not a complete LoRA adapter: {error!r}") from error


def read_headers(directory: Path) -> dict[str, AdapterHeader]:
    """Read the adapters of a version: one, under the name "", or those in its subdirectories, by their names.

    Raises WeightsError, also if they have different base models.
    """
    if (directory / ADAPTER_CONFIG).is_file():
        return {"": read_header(directory)}
    headers = {path.parent.name: read_header(path.parent) for path in directory.glob(f"*/{ADAPTER_CONFIG}")}
    if len({(header.base, header.base_checksum) for header in headers.values()}) != 1:
        raise WeightsError(f"{directory}: its adapters have no common base model")
    return headers


def base_directory(model: Path) -> Path:
    """Return the directory with config and tokenizer of a model, which an adapter has from its base."""
    return next(iter(read_headers(model).values())).base if is_adapter(model) else model
