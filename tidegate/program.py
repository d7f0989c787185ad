"""Shell commands that start or install this program, for messages."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "tidegate"
SOURCE = "git+https://github.com/tidegate/tidegate"
"""What pip installs: Tidegate is on no package index."""


def program() -> str:
    """Returns `tidegate` if that is this installation on the PATH, else a command that starts it."""
    if _on_path(NAME):
        return NAME
    script = Path(sys.executable).with_name(NAME)
    return shlex.quote(str(script)) if script.exists() else f"{python()} -m {NAME}"


def python() -> str:
    """Returns `python` if that is this interpreter on the PATH, else its path."""
    return "python" if _on_path("python") else shlex.quote(sys.executable)


def advise_extra(extra: str) -> str:
    """Returns the advice to install an extra of Tidegate, which completes `…: ` in an error message."""
    return f"install Tidegate's extra {extra!r} (in a clone: pip install -e '.[{extra}]')"


def extra_requirement(extra: str) -> str:
    """Returns the argument of `pip install`, quoted for a shell, that installs an extra without a clone."""
    return shlex.quote(f"{NAME}[{extra}] @ {SOURCE}")


def _on_path(name: str) -> bool:
    path = shutil.which(name)
    return path is not None and Path(path).absolute().parent == Path(sys.executable).parent
