"""`tidegate convert`: makes a model directory from a GGUF file or a model on the Hugging Face hub."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from tidegate.cli.commands import Subparsers
from tidegate.errors import ConfigError, StartError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a model directory from a GGUF file or a model on the Hugging Face hub",
        description="Write a directory for model.path: the model of a GGUF file in float32, or the files of "
        "a model on the Hugging Face hub. Model and tokenizer are checked.",
    )
    parser.add_argument("source", help="a GGUF file, or an id on the hub such as Qwen/Qwen3-0.6B")
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.doctor.model import refuse_unusable

    file, out = Path(arguments.source), arguments.out
    if out.exists():
        raise ConfigError(f"--out {out} exists already: remove it, or name another directory")
    if file.is_dir():
        raise ConfigError(f"{file} is a directory already: set model.path to it")
    is_hub_id = not file.exists() and file.suffix != ".gguf" and HUB_ID.fullmatch(arguments.source)
    if not file.is_file() and not is_hub_id:
        raise ConfigError(
            f"{file}: there is no such file, and it is no id on the Hugging Face hub (owner/name)"
        )
    partial = out.with_name(f".{out.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if is_hub_id:
        _download(arguments.source, partial)  # what was downloaded stays, so that it can be continued
        refuse_unusable(partial)
    else:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _convert(file, partial)
            refuse_unusable(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    partial.rename(out)
    print(f"the model is {out}")
    return 0


def _convert(file: Path, partial: Path) -> None:
    from tidegate.devices import free_memory
    from tidegate.weights.gguf import convert

    print(f"{convert(file, partial, free_memory('cpu')):,} parameters")


def _download(name: str, partial: Path) -> None:
    """Downloads a model's files; continues a download that was interrupted. Raises StartError."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, local_dir=partial, allow_patterns=FILES)
    except Exception as error:  # the hub's, the network's and the disk's errors are of many types
        why = str(error).strip().partition("\n")[0]
        raise StartError(
            f"{name} cannot be fetched from the Hugging Face hub: {type(error).__name__}: {why}. Without a "
            "network, copy the model's directory or its GGUF file to this machine; with one, unset "
            "HF_HUB_OFFLINE"
        ) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
