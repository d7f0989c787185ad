"""Shell commands that start this program, for messages."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "tidegate"


def program() -> str:
    """Returns `tidegate` if that is this installation on the PATH, else a command that starts it."""
    if _on_path(NAME):
        return NAME
    script = Path(sys.executable).with_name(NAME)
    return shlex.quote(str(script)) if script.exists() else f"{python()} -m {NAME}"


def python() -> str:
    """Returns `python` if that is this interpreter on the PATH, else its path."""
    return "python" if _on_path("python") else shlex.quote(sys.executable)


def _on_path(name: str) -> bool:
    path = shutil.which(name)
    return path is not None and Path(path).absolute().parent == Path(sys.executable).parent
