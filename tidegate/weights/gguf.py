"""Converts a GGUF file, the format of llama.cpp, to a model directory in Hugging Face format.

transformers reads the file, but trusts its header: a header that promises more than the file holds makes it
read without end, and tensors that it does not know are left out without a message. So the header is compared
with the file first, and the loaded model with the header afterwards.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from tidegate.weights.files import WeightsError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
VERSIONS = (2, 3)
FLOAT32 = 4
COPIES = 2
"""Copies of a model in float32 that a conversion holds at most: the tensors that were read, and the model."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says about itself."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """Values by key; of an array only its length."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors by name; the dimension that varies fastest is the first."""

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def read_header(path: Path) -> Header:
    """Reads the header and compares it with the size of the file. Raises WeightsError."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            return _Reader(file, size).header()
    except (_DamageError, UnicodeDecodeError) as error:
        why = f"{error}: it is damaged or was downloaded in part ({size:,} bytes); fetch it again"
    except (OSError, _RefusedError) as error:
        why = str(error)
    raise WeightsError(f"{path}: not a usable GGUF file: {why}")


class _DamageError(Exception):
    pass


class _RefusedError(Exception):
    pass


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise _DamageError("its first four bytes are not GGUF")
        version = self._one("I")
        if version not in VERSIONS:
            raise _RefusedError(
                f"format version {version}; versions {VERSIONS} in little-endian order are read"
            )
        header, tensors, keys = Header(), self._one("Q"), self._one("Q")
        for _ in range(keys):
            key = self._text()
            header.metadata[key] = self._value(self._one("I"))
        ends = dict(self._tensor(header) for _ in range(tensors))
        alignment = header.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _DamageError(f"general.alignment is {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        for name, end in ends.items():
            if start + end > self._size:
                raise _DamageError(f"the tensor {name} ends at byte {start + end:,}")
        return header

    def _take(self, number: int) -> bytes:
        if number > self._size - self._file.tell():
            raise _DamageError(f"a field of its header has {number:,} bytes, more than follow")
        return self._file.read(number)

    def _one(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def _text(self) -> str:
        return self._take(self._one("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._one(_SCALARS[kind])
        item, length = (self._one("I"), self._one("Q")) if kind == _ARRAY else (None, 0)
        if item == _STRING:
            for _ in range(length):
                self._take(self._one("Q"))
        elif item in _SCALARS:
            self._take(length * struct.calcsize(f"<{_SCALARS[item]}"))
        else:
            raise _DamageError(f"its header has a value of an unknown type ({kind}, {item})")
        return length

    def _tensor(self, header: Header) -> tuple[str, int]:
        """Enters a tensor's shape; returns its name and the end of its data, from the start of all data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._text(), self._one("I")
        if dimensions > 4:
            raise _DamageError(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self._one("Q") for _ in range(dimensions))
        kind, offset = self._one("I"), self._one("Q")
        sizes = {one.value: GGML_QUANT_SIZES[one] for one in GGMLQuantizationType if one in GGML_QUANT_SIZES}
        if kind not in sizes:
            raise _DamageError(f"the tensor {name} has the unknown type {kind}")
        header.shapes[name] = shape
        block, size = sizes[kind]
        return name, offset + -(-prod(shape) // block) * size


def check_header(path: Path, header: Header, free: int | None) -> None:
    """Checks what can be checked before anything is loaded.

    Args:
        path: The file, for messages.
        header: Its header.
        free: Free memory in bytes; None if unknown.

    Raises:
        WeightsError: transformers cannot read this architecture, the file is a part of a model, it has no
            chat template, end-of-turn token or matching tokenizer, or the model does not fit in memory.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    def refuse(why: str) -> WeightsError:
        return WeightsError(f"{path}: {why}")

    data = header.metadata
    architecture, kind = data.get("general.architecture"), data.get("general.type", "model")
    known = [name for name in GGUF_SUPPORTED_ARCHITECTURES if name not in ("general", "tokenizer")]
    names = [name.replace("_", "") for name in known]
    if str(architecture).replace("_", "").replace("-", "") not in names:
        raise refuse(
            f"the architecture {architecture!r} cannot be converted; these can: {', '.join(sorted(known))}. "
            "Take the model in Hugging Face format instead"
        )
    if kind != "model" or data.get("split.count", 1) > 1:
        part = f"part 1 of {data['split.count']}" if data.get("split.count", 1) > 1 else f"of type {kind!r}"
        raise refuse(f"it is {part}, not a whole model; join the parts with llama-gguf-split --merge")
    if not data.get("tokenizer.chat_template"):
        raise refuse("it has no chat template (tokenizer.chat_template): take the chat (instruct) model")
    if "tokenizer.ggml.eos_token_id" not in data:
        raise refuse("it names no end-of-turn token (tokenizer.ggml.eos_token_id): take the chat model")
    rows = (header.shapes.get("token_embd.weight") or (0, 0))[-1]
    tokens = data.get("tokenizer.ggml.tokens", 0)
    if rows != tokens:
        raise refuse(
            f"its tokenizer has {tokens:,} tokens, its embedding {rows:,} rows: tokenizer and weights are of "
            "different models"
        )
    needed = COPIES * FLOAT32 * header.parameters
    if free is not None and needed > free:
        raise refuse(
            f"the conversion of {header.parameters:,} parameters needs {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free: convert it on a larger machine"
        )


def convert(path: Path, out: Path, free: int | None) -> int:
    """Writes the model of a GGUF file, in float32, with tokenizer and chat template, to a new directory.

    Args:
        path: The file.
        out: The directory.
        free: Free memory in bytes; None if unknown.

    Returns:
        The number of parameters.

    Raises:
        WeightsError: The file cannot be converted.
        ModuleNotFoundError: The extra `gguf` is not installed.
    """
    import accelerate  # noqa: F401  # transformers reads GGUF files with it
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    header = read_header(path)
    check_header(path, header, free)
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
        loaded, info = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, output_loading_info=True, **source
        )
    except Exception as error:  # transformers raises many types
        raise WeightsError(f"{path}: transformers cannot read it: {error}") from error
    values = dict(loaded.named_parameters())
    lost = sorted(str(name) for fault in ("missing_keys", "mismatched_keys") for name in info[fault])
    number = sum(int(value.numel()) for value in values.values())
    if lost or number != header.parameters:
        known = ("blk.", "token_embd.", "output")
        unused = [name for name in header.shapes if not name.startswith(known)]
        raise WeightsError(
            f"{path}: it has {header.parameters:,} numbers, the model that transformers makes of it "
            f"{number:,} (different: {', '.join([*lost, *unused][:5]) or 'some of its layers'}), and would "
            "reply differently; take the model in Hugging Face format"
        )
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()) or (not bool(value.any()) and value.ndim > 1):
            raise WeightsError(f"{path}: {name} has only zeros or is not finite: damaged; fetch it again")
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):  # one that was loaded from GGUF refuses to be saved
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return number
