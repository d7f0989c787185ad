"""Outages during a run: all engines of the demo, or the retrieval server of the search demo, are down.

The server is killed (-9) after half of the steps, and restarted at its address after `--seconds` (by default
three minutes). Each demo also runs without an outage. No task may be quarantined, no episode lost or trained
on twice (`lineage.py` checks the files), and the policy must reach the same held-out reward within 0.05; the
standard error of the difference is 0.02.

    python benchmarks/outage.py [--json] [--seconds 180] [--steps N] [--only engines|retrieval] [--alone]
                                [--keep DIR]
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Check, parser_of, place, report
from lineage import last_step, lineage_of, metrics_of

from tidegate.config import load_settings
from tidegate.trainer.ledger.audit import audit_run

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
MARGIN = 0.05
UP_S, RUN_S = 600.0, 3600.0


class Server:
    """A server process that can be killed and restarted at the same address."""

    def __init__(self, command: Sequence[str], health: str, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "tidegate", *command, "--port", str(port)]
        self._health = self.url + health
        self._log = directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT
            )
        until = time.monotonic() + UP_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(self._command)} did not start; see {self._log}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._health, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


@dataclass(frozen=True)
class Part:
    """A demo, the server that is stopped, and the setting with the server's address."""

    name: str
    config: Path
    setting: str

    def server(self, directory: Path) -> Server:
        settings = load_settings(self.config)
        if self.name == "engines":
            engine = settings.engine
            command = [
                "engine", "--model.path", str(settings.model.path), "--weight-version", "0",
                f"--engine.max_slots={engine.max_slots}", f"--engine.max_context={engine.max_context}",
            ]  # fmt: skip
            return Server(command, "/model_info", directory)
        sys.path.insert(0, str(self.config.parent))
        from demo import build_index

        return Server(["rag", "serve", str(build_index(directory / "corpus", 0))], "/health", directory)


PARTS = (
    Part("engines", ROOT / "examples" / "demo" / "config.toml", "engine.urls"),
    Part("retrieval", ROOT / "examples" / "demo_search" / "config.toml", "agent.options.urls"),
)


def train(part: Part, directory: Path, seconds: float, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs the demo once; if `seconds` > 0, its server is down for that long."""
    directory.mkdir(parents=True)
    server = part.server(directory)
    server.start()
    place = [f"--run.dir={directory}", "--run.name=run", "--run.live_view=false"]
    place += [f"--{part.setting}={json.dumps([server.url])}", *overrides]
    steps = load_settings(part.config, overrides).trainer.steps
    with open(directory / "out", "wb") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "tidegate", "train", str(part.config), *place],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=ENVIRONMENT,
        )  # fmt: skip
    try:
        if seconds:
            until = time.monotonic() + RUN_S
            while (
                last_step(directory / "run") < steps // 2 and run.poll() is None and time.monotonic() < until
            ):
                time.sleep(0.1)
            server.kill()
            time.sleep(seconds)
            server.start()
        code = run.wait(RUN_S)
    finally:
        run.kill()
        run.wait()
        server.kill()
    return {
        "run": part.name,
        "outage_s": seconds,
        "exit": code,
        **figures(part, directory / "run", overrides),
    }


def figures(part: Part, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    metrics = metrics_of(run_dir)
    found = lineage_of(run_dir, load_settings(part.config, overrides).trainer.groups_per_batch)
    audit = audit_run(run_dir)
    for problem in [*found.lost[:10], *found.doubled[:10], *audit.findings[:10]]:
        print(problem, file=sys.stderr)
    return {
        "steps": found.steps,
        "held_out": metrics[-1].get("eval/reward"),
        "paused_s": round(metrics[-1]["outage/seconds"], 1),
        "infra_errors": sum(one.get("outcome") == "infra_error" for one in lines),
        "quarantined": sum(one["event"] == "quarantined" for one in lines),
        "groups_failed": sum(one["kind"] == "group" and one.get("state") == "failed" for one in lines),
        "lost": len(found.lost),
        "doubled": len(found.doubled),
        "audit_findings": len(audit.findings),
    }


def checks_of(results: Sequence[dict[str, Any]], seconds: float) -> list[Check]:
    during = results[-1]
    name = during["run"]
    behind = [during["held_out"] - without["held_out"] for without in results[:-1]]
    return [
        *(Check(f"{name}_{one}", float(during[one]), "==", 0)
          for one in ("quarantined", "lost", "doubled", "audit_findings", "exit")),
        *(Check(f"{name}_held_out_less_without", one, ">=", -MARGIN) for one in behind),
        Check(f"{name}_paused_s", during["paused_s"], ">=", seconds / 2),
    ]  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="duration of each outage")
    parser.add_argument("--steps", type=int, help="steps per run; default: the demo's")
    parser.add_argument("--only", choices=[part.name for part in PARTS])
    parser.add_argument("--alone", action="store_true", help="only the runs with an outage")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments, overrides = parser.parse_known_args()
    if arguments.steps is not None:
        overrides.append(f"--trainer.steps={arguments.steps}")
    results, checks = [], []
    with place(arguments.keep, "outage") as directory:
        for part in PARTS:
            if arguments.only not in (None, part.name):
                continue
            pair = []
            for seconds in (arguments.seconds,) if arguments.alone else (0.0, arguments.seconds):
                name = f"{part.name}-{'outage' if seconds else 'without'}"
                pair.append(train(part, directory / name, seconds, overrides))
            results += pair
            checks += checks_of(pair, arguments.seconds)
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
