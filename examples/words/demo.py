"""The main demo: `make demo`, or `python examples/words/demo.py [--section.key value ...]`.

Fetches a language model, converts it, warms it up and trains it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tidegate.config import Settings, load_settings
from tidegate.errors import StartError, TidegateError

CONFIG = Path(__file__).with_name("config.toml")


def run(command: list[str]) -> None:
    """Raises StartError if a command fails; its own output says why."""
    if subprocess.run(command, check=False, timeout=1800).returncode:
        raise StartError(f"this command failed: {' '.join(command)}")


def prepare(settings: Settings) -> None:
    """Fetches the model, once. Raises StartError."""
    if not settings.model.path.is_dir():
        run([sys.executable, "-m", "tidegate", "convert", "smollm2", "--out", str(settings.model.path)])


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
