"""For tests of sandboxes: a mark for those that need bubblewrap, and a search for processes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest


def _bubblewrap_works() -> bool:
    """Whether bwrap is installed, and the kernel lets it make namespaces."""
    if shutil.which("bwrap") is None:
        return False
    command = ["bwrap", "--unshare-user", "--unshare-net", "--ro-bind", "/", "/", "true"]
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


needs_bubblewrap = pytest.mark.skipif(
    not _bubblewrap_works(), reason="bwrap is absent, or does not work here"
)


def with_words(word: str) -> list[int]:
    """Processes of this machine whose command line contains a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
