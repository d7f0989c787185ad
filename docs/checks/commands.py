"""Runs the commands of all pages that are cheap and end by themselves: part of `make test-docs`.

python -m docs.checks.commands
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from docs.checks.blocks import ROOT, blocks, runs

LIMIT_S = 120
DEMO = (
    "tidegate train examples/demo/config.toml --trainer.steps 2 --trainer.groups_per_batch 4 "
    "--eval.tasks 8 --eval.every 0"
)
"""Makes `runs/demo`, which pages name."""


def workplace(folder: Path) -> None:
    """Fills a folder with links to what commands name, so that they write nothing into the repository."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", "build"):
            (folder / path.name).symlink_to(path)


def run(command: str, folder: Path) -> str:
    """Returns the end of a command's output if it fails, else nothing."""
    environment = {**os.environ, "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {LIMIT_S} s"
    return (done.stdout + done.stderr)[-2000:] or f"exit status {done.returncode}" if done.returncode else ""


def main() -> int:
    commands = {command: str(block) for block in blocks() if block.language == "bash"
                for command in block.commands() if runs(command)}  # fmt: skip
    failed, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="commands-", ignore_cleanup_errors=True) as folder:
        workplace(Path(folder))
        for command, place in {DEMO: "preparation", **commands}.items():
            at = time.monotonic()
            error = run(command, Path(folder))
            failed += bool(error)
            print(
                f"{place:<32} {time.monotonic() - at:4.0f} s  {'FAILED' if error else 'ok'}  {command}",
                flush=True,
            )
            if error:
                print(error, flush=True)
    print(
        f"{len(commands)} commands of pages in {time.monotonic() - began:.0f} s, {failed} failed", flush=True
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
