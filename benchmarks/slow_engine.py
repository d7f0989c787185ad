"""An engine of 20 tokens per second with the default settings: no outage, no quarantine, and steps are taken.

The embedded engine serves the tiny model; after each token of a batch it sleeps, so that all its replies
together have `--rate` tokens per second. A second run has an engine that is killed (-9) after its first step
and restarted 20 s later at its address: the outage is noticed, ends, and costs no task. `agent.deadline_s`,
`sampling.max_tokens` and the sizes of batches and groups are the defaults.

    python benchmarks/slow_engine.py [--json] [--rate 20] [--steps 2] [--only slow|killed] [--keep DIR]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Check, parser_of, place, report
from lineage import last_step
from outage import ENVIRONMENT, ROOT, Server

from tidegate.scaffold.example_files import TINY_BASE
from tidegate.trainer.ledger.state import read_ledger_state

DOWN_S, RUN_S = 20.0, 1500.0


class SlowServer(Server):
    """The embedded engine in a process of this file, which throttles it."""

    def __init__(self, rate: float, directory: Path) -> None:
        command = ["engine", "--model.path", str(TINY_BASE), "--weight-version", "0"]
        super().__init__(command, "/model_info", directory)
        self._command = [sys.executable, __file__, f"--serve={rate}", *self._command[3:]]


def serve_throttled(rate: float, arguments: Sequence[str]) -> int:
    """Serves the embedded engine with at most `rate` tokens per second."""
    from tidegate.cli import main
    from tidegate.engine.scheduling.running_batch import RunningBatch

    sample = RunningBatch.sample

    def throttled(batch: RunningBatch) -> Any:
        began = time.monotonic()
        sampled = sample(batch)
        time.sleep(max(0.0, batch.count / rate - (time.monotonic() - began)))
        return sampled

    RunningBatch.sample = throttled  # type: ignore[method-assign]
    return main(list(arguments))


def train(name: str, rate: float, steps: int, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs `arithmetic` on a throttled engine; in the run `killed` the engine is down for DOWN_S."""
    directory.mkdir(parents=True)
    server = SlowServer(rate, directory)
    server.start()
    settings = [
        f"--model.path={TINY_BASE}", "--env.use=arithmetic", "--agent.use=solver", f"--trainer.steps={steps}",
        f"--engine.urls={json.dumps([server.url])}", f"--run.dir={directory}", "--run.name=run",
        "--run.live_view=false", "--eval.first=false", "--eval.last=false", "--eval.every=0", *overrides,
    ]  # fmt: skip
    began = time.monotonic()
    with open(directory / "out", "wb") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "tidegate", "train", *settings],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=ENVIRONMENT,
        )  # fmt: skip
    try:
        if name == "killed":
            while last_step(directory / "run") < 1 and run.poll() is None:
                time.sleep(0.1)
            server.kill()
            time.sleep(DOWN_S)
            server.start()
        code = run.wait(RUN_S)
    finally:
        run.kill()
        run.wait()
        server.kill()
    return {"run": name, "rate": rate, "exit": code, "seconds": time.monotonic() - began,
            **figures(directory)}  # fmt: skip


def figures(directory: Path) -> dict[str, Any]:
    state = read_ledger_state(directory / "run" / "ledger.jsonl")
    lines = [json.loads(line) for line in (directory / "run" / "ledger.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if line["kind"] == "run"]
    return {
        "steps": last_step(directory / "run"),
        "outages": events.count("paused"),
        "quarantined": events.count("quarantined"),
        "attempts": len(state.attempts),
        **{f"failed_{cause}": number for cause, number in state.failures().items()},
    }


def checks(result: dict[str, Any], steps: int) -> list[Check]:
    killed = result["run"] == "killed"
    name = "killed_" if killed else ""
    return [
        Check(f"{name}outages", result["outages"], "==", int(killed)),
        Check(f"{name}quarantined", result["quarantined"], "==", 0),
        Check(f"{name}steps", result["steps"], ">=", steps if killed else 1),
        Check(f"{name}exit", result["exit"], "==", 0),
    ]


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1].startswith("--serve="):
        return serve_throttled(float(sys.argv[1].partition("=")[2]), sys.argv[2:])
    parser = parser_of(__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second of the engine")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", choices=("slow", "killed"))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in DIR")
    arguments, overrides = parser.parse_known_args()
    results, found = [], []
    with place(arguments.keep, "slow") as directory:
        for name in ("slow", "killed"):
            if arguments.only in (None, name):
                rate = arguments.rate if name == "slow" else 50 * arguments.rate
                results.append(train(name, rate, arguments.steps, directory / name, overrides))
                found += checks(results[-1], arguments.steps)
    return report(results, found, as_json=arguments.json)


if __name__ == "__main__":
    os.environ.update({name: ENVIRONMENT[name] for name in ("OMP_NUM_THREADS",)})
    raise SystemExit(main())
