"""Second starts of a live run: each is refused, and the run goes on as if there had been none.

    python benchmarks/second_start.py [--json] [--tries 10]

A demo run trains while `tidegate train` is called again under its name at random moments, also before its
first step: plain, with `--fresh`, with `--resume` and with `--resume auto`. A start does harm if it is not
refused, if the run ends, or if the run's directory, settings or siblings differ afterwards. At the end the
run must have gone on, stop on request, and pass its audit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Check, parser_of, report

from tidegate.errors import STOPPED
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.ledger import read_ledger
from tidegate.trainer.records.metrics import read_metrics

REPO = Path(__file__).parent.parent
STARTS = ([], ["--fresh"], ["--resume"], ["--resume", "auto"])
SMALL = [
    "--run.live_view=false", "--trainer.steps=100000", "--trainer.groups_per_batch=4",
    "--trainer.group_size=4", "--trainer.checkpoint_every=2", "--eval.tasks=16", "--eval.every=0",
    "--agent.max_concurrency=32",
]  # fmt: skip
REFUSED = 3
LIMIT_S = 600.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(parent: Path, *more: str) -> list[str]:
    place = ["examples/demo/config.toml", f"--run.dir={parent}", "--run.name=live"]
    return [sys.executable, "-m", "tidegate", "train", *place, *SMALL, *more]


def steps(run_dir: Path) -> int:
    return max((int(line["step"]) for line in read_metrics(run_dir)), default=0)


def seen(run_dir: Path) -> tuple[Any, ...]:
    """What a second start must not change."""
    siblings = sorted(path.name for path in run_dir.parent.iterdir() if path.is_dir())
    return run_dir.stat().st_ino, (run_dir / "config.toml").read_bytes(), siblings


def wait(run: subprocess.Popen[bytes], holds: Any) -> bool:
    """Waits until `holds()`; returns False if the run ended or the time is over."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if run.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def measure(parent: Path, tries: int, longest_s: float, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Returns a row for each second start, and the number that did harm."""
    rng, run_dir, rows = random.Random(seed), parent / "live", []
    with (parent / "live.out").open("wb") as out:
        run = subprocess.Popen(command(parent), cwd=REPO, env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        wait(run, (run_dir / "config.toml").exists)
        before, harmed = seen(run_dir), 0
        for number in range(tries):
            time.sleep(rng.uniform(0.0, longest_s))
            more, began, step = STARTS[number % len(STARTS)], time.monotonic(), steps(run_dir)
            second = subprocess.run(
                command(parent, *more), cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True
            )
            named = f"process {run.pid}" in second.stderr
            harms = second.returncode != REFUSED or run.poll() is not None or seen(run_dir) != before
            harmed += harms
            rows.append(
                {"start": " ".join(more) or "plain", "at_step": step, "exit": second.returncode,
                 "names_the_run": named, "harmed": harms, "seconds": time.monotonic() - began}
            )  # fmt: skip
        target = steps(run_dir) + 2
        goes_on = wait(run, lambda: steps(run_dir) >= target)
        run.send_signal(signal.SIGINT)
        stopped = run.wait(LIMIT_S) == STOPPED
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    starts = sum(entry["event"] == "started" for entry in read_ledger(run_dir / "ledger.jsonl"))
    sound = audit_run(run_dir).consistent and starts == 1
    rows.append({"run": "at the end", "goes_on": goes_on, "stops": stopped, "audit_and_one_start": sound})
    return rows, harmed + (not (goes_on and stopped and sound))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument(
        "--longest", type=float, default=10.0, help="longest pause between two starts in seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="second-start-") as place:
        rows, harmed = measure(Path(place), arguments.tries, arguments.longest, arguments.seed)
    unnamed = sum(not row["names_the_run"] for row in rows if "start" in row)
    checks = [
        Check("harmed", harmed, "==", 0),
        Check("refusals_without_process_id", unnamed, "==", 0),
    ]
    return report(rows, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
