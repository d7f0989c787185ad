"""How this program is called from the shell that it was started from."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "tidegate"


def program() -> str:
    """`tidegate` where the shell finds this one by that name, else a command that starts it."""
    beside = Path(sys.executable).with_name(NAME)
    found = shutil.which(NAME)
    if found is not None and Path(found).absolute().parent == beside.parent:
        return NAME
    return shlex.quote(str(beside)) if beside.exists() else f"{python()} -m {NAME}"


def python() -> str:
    """`python` where the shell finds this interpreter by that name, else its path."""
    found = shutil.which("python")
    if found is not None and Path(found).absolute().parent == Path(sys.executable).parent:
        return "python"
    return shlex.quote(sys.executable)
