"""Serves runs for a browser, and checks that a page has no errors."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.chromium import Page
from tests.waiting import announced

HASH = "decodeURIComponent(location.hash)"


TIP = "document.getElementById('tooltip')"


@contextlib.contextmanager
def viewed(run_dir: Path, scratch: Path, *others: Path) -> Iterator[str]:
    """Serves a run, or several; yields the URL."""
    address = scratch / f"{run_dir.name}.address"
    runs = [str(path) for path in (run_dir, *others)]
    command = [sys.executable, "-m", "tidegate", "view", *runs, "--port", "0", "--owned",
               "--announce", str(address)]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield announced(address, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


def clean(page: Page, url: str) -> None:
    assert page.errors == []
    strangers = [one for one in page.asked if not one.startswith(url)]
    assert strangers == []
