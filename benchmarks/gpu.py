r"""Measures Tidegate on one GPU, in parts of which each is a process of its own.

    python benchmarks/gpu.py [--minutes 9] [--only PART ...] [--keep DIR]
    python benchmarks/gpu.py --long --sglang PYTHON --minutes 60
    python benchmarks/gpu.py --device cpu --tiny     # executes every part; its figures are meaningless

Every figure is printed at once, as a JSON object on a line. A part that fails, aborts or exceeds its limit
does not affect the others; the last line of each part says how it ended. `gpu_parts.py` describes the parts,
which are ordered by worth; time that one does not use is divided among the later ones. `--long` runs those
that train on GSM8K, with the embedded engine and with SGLang, of whose environment `--sglang` is the
interpreter.

The machine needs torch and transformers, but no network. The other packages, 24 MB, travel as wheels:

    python -m pip download --dest build/wheels --only-binary :all: --python-version 3.12 uvloop zstandard \
        $(python -c "import tomllib
    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'])")
    rm build/wheels/numpy-*

and are unpacked on the machine:

    for wheel in build/wheels/*.whl; do python -m zipfile -e $wheel build/packages; done
    PYTHONPATH=$PWD/build/packages python benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import place

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("gpu_parts.py")
PARTS = {
    "kernels": 45, "steps": 100, "ranks": 50, "publish": 50, "logprobs": 50, "compiled": 95, "decode": 45,
    "predicted": 40, "demo": 65,
}  # fmt: skip
"""Shares of the time. They add up to 9 minutes, in which each is the shortest limit of a part, in seconds."""
LONG_PARTS = {"gsm8k": 240, "gsm8k_sglang": 300}
SHORTEST_S = 15.0
"""No part starts if less time is left: importing torch takes most of it."""


def say(part: str, row: dict[str, Any]) -> None:
    print(json.dumps({"part": part, **row}), flush=True)


def relay(part: str, line: str) -> None:
    """Prints a line of a part if it is a JSON object; libraries print other lines."""
    try:
        row = json.loads(line)
    except ValueError:
        return
    if isinstance(row, dict):
        say(part, row)


def run_part(part: str, limit_s: float, command: Sequence[str], log: Path) -> bool:
    """Runs a part and the processes that it starts; returns whether it succeeded."""
    began = time.monotonic()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("w", encoding="utf-8") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:  # fmt: skip

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                relay(part, line)
            code = process.wait()
        finally:
            timer.cancel()
            kill()
    seconds = time.monotonic() - began
    last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    row: dict[str, Any] = {"ended": "done" if code == 0 else f"exit status {code}", "seconds": seconds}
    if code != 0:
        row["error"] = last[-1] if last else ""
    if seconds >= limit_s:
        row["ended"] = f"killed after its limit of {limit_s:.0f} s"
    say(part, row)
    return code == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, which test the script")
    parser.add_argument("--long", action="store_true", help="the parts on GSM8K instead")
    parser.add_argument("--sglang", default="", help="interpreter of SGLang's environment")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts")
    parser.add_argument("--only", choices=[*PARTS, *LONG_PARTS], nargs="+", help="run these parts alone")
    parser.add_argument("--keep", type=Path, help="directory of models, runs and logs, which is kept")
    given = parser.parse_args(arguments)
    parts = LONG_PARTS if given.long else PARTS
    if given.only:
        parts = {part: share for part, share in (PARTS | LONG_PARTS).items() if part in given.only}
    shares = sum(parts.values())
    end = time.monotonic() + 60 * given.minutes
    succeeded = True
    with place(given.keep and given.keep.absolute(), "gpu") as directory:
        for part, share in parts.items():
            left = end - time.monotonic()
            if left < SHORTEST_S:
                say(part, {"ended": "not started, as too little time is left", "seconds": 0.0})
                succeeded = False
                continue
            limit = left * share / shares
            shares -= share
            options = [part, str(directory), given.device, str(int(given.tiny)), given.sglang, str(limit)]
            command = [sys.executable, str(SCRIPT), *options]
            succeeded &= run_part(part, limit, command, directory / f"{part}.log")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
