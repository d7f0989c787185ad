"""Kills the demo at every durable write and 30 times at random, and checks that nothing is lost.

First the trainer is killed (`kill -9`) once before and once after each kind of its durable writes, and is
resumed each time; the gateway is killed before, within and after each kind of its own. Then `--kills` random
kills follow, of trainer, agent process, gateway, engine, environment service and its worker. Finally the run
continues to its end. Some tasks always raise, so that failures are written too. After each exit of the
trainer an audit must find nothing. `lineage.py`, which shares no code with the writers, then reads the fate
of every episode from ledger, trajectories and checkpoints.

With `--stateful` each episode has a state, and its calculator is a tool of the environment (`desk.py`). With
`--policies` the run is that of examples/duo, and both policies of a checkpoint must have taken its steps.
With `--tinker` the run trains and samples at a stand-in for a Tinker service (`tests/fake_tinker.py`), whose
states are files, and is killed between the calls of a step, too; rewards are those of a coin.

With `--keep DIR --for SECONDS` the benchmark runs in pieces: a piece stops after its time (the run is killed
once more) with exit code 2, and the next call with the same DIR continues.

    python benchmarks/chaos.py [--json] [--steps 40] [--kills 30] [--failpoints NAMES] [--seed 0]
                               [--stateful | --policies | --tinker] [--keep DIR [--for SECONDS]]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common import Check, parser_of, place, report
from lineage import last_step, lineage_of, metrics_of

from tidegate.failpoints import PASSED, VARIABLE
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.ledger.audit import audit_run

ROOT = Path(__file__).parents[1]
DEMO, DUO, AT_SERVICE = (ROOT / "examples" / name / "config.toml" for name in ("demo", "duo", "tinker"))
GROUPS_PER_BATCH = 8
WRITES = (
    "config", "metrics.line", "metrics.truncated", "trajectories.step", "trajectories.eval",
    "trajectories.dropped", "trajectories.failed", "trajectories.taken_back", "checkpoint.weights",
    "checkpoint.state", "checkpoint.marker", "checkpoint.unmarked", "checkpoint.removed",
    "best.copied", "best.link", "publish.weights", "dead_letters", "ledger.run.started",
    "ledger.run.publishing", "ledger.run.quarantined",
    "ledger.group.issued", "ledger.group.stepped", "ledger.group.stale", "ledger.group.filtered",
    "ledger.group.failed", "ledger.group.cancelled", "ledger.group.put_back", "ledger.attempt.issued",
    "ledger.attempt.stepped", "ledger.attempt.stale", "ledger.attempt.filtered", "ledger.attempt.failed",
    "ledger.attempt.cancelled",
)  # fmt: skip
"""Durable writes of the trainer, except the one that ends a run."""
TINKER = ("tinker.backward", "tinker.step", "tinker.state", "tinker.sampler", "tinker.deleted")
"""Calls of the trainer at a Tinker service, after which it is killed with `--tinker`."""
LAST = ("ledger.run.ended",)
GATEWAY = (
    "opened", "recorded", "sent", "closing", "finished", "forgotten", "sealed", "entered", "leased", "ended",
    "engines",
)  # fmt: skip
"""Durable writes of the gateway, except `rewarded` and `returned`: the demo's agents post no rewards, and no
lease is returned. The gateway's own crash tests cover all of them."""
AT_ONCE = 4
"""Gateway failpoints armed per start of the trainer, which restarts the gateway five times."""
WHILE_TRAINING = 0.8
"""Share of starts after which the next random kill waits until the run has written to its ledger."""
MARKS = {"agents": "worker", "gateway": "gateway", "engine": "engine", "environments": "env"}
"""Processes that the trainer starts, and their commands."""
PROCESSES = ("trainer", *MARKS, "environment_worker")
STARTED_S, QUIET_S = 90.0, 120.0
GAVE_UP = 3
"""Exit code of a run whose gateway or engine exited too often in one start."""
UNFINISHED = 2
"""Exit code of this script when the time of the piece is over."""


@dataclass
class Chaos:
    """One run directory and the trainer processes that continue it, one after another."""

    run_dir: Path
    steps: int
    tasks: int
    rng: random.Random
    stateful: bool = False
    policies: bool = False
    tinker: bool = False
    starts: int = 0
    seconds: float = 0.0
    """Duration of the earlier pieces."""
    exits: Counter[int] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    unreached: list[str] = field(default_factory=list)
    """Failpoints skipped because the run did not reach them for a while."""
    findings: list[str] = field(default_factory=list)
    """Findings of the audits after each exit of the trainer."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def passed(self) -> set[str]:
        """Failpoints at which a process was killed."""
        return {path.name for path in self.fired.glob("*")}

    @property
    def fired(self) -> Path:
        return self.run_dir.parent / "passed"

    def start(self, places: dict[str, int]) -> None:
        """Starts or resumes the run with these failpoints armed."""
        self.fired.mkdir(exist_ok=True, parents=True)
        resume = ["--resume"] if (self.run_dir / "ledger.jsonl").exists() else []
        agent = "RaisingChat" if self.stateful else "raising_duo" if self.policies else "RaisingSolver"
        world = "Desk" if self.stateful else "Coin" if self.tinker else None
        environments = [f"--env.use={ROOT}/benchmarks/desk.py:{world}"] if world else []
        armed = ",".join(f"{name}:{count}" for name, count in places.items())
        environment = {
            **os.environ, VARIABLE: armed, PASSED: str(self.fired), "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        config = DUO if self.policies else DEMO
        if self.tinker:
            config, path = AT_SERVICE, f"{ROOT}/tests/tinker_sdk:{ROOT}"
            environment |= {"PYTHONPATH": path, "FAKE_TINKER": str(self.run_dir.parent / "service")}
            environments.append("--trainer.tinker.base_url=http://127.0.0.1:1")
        with open(self.run_dir.parent / "out", "ab") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "tidegate", "train", str(config), *resume,
                    f"--run.dir={self.run_dir.parent}", f"--run.name={self.run_dir.name}",
                    "--run.live_view=false",
                    f"--trainer.steps={self.steps}", "--trainer.checkpoint_every=2",
                    f"--trainer.groups_per_batch={GROUPS_PER_BATCH}", "--trainer.learning_rate=3e-4",
                    "--trainer.schedule=constant", "--eval.every=3", "--eval.interim_tasks=16",
                    f"--eval.tasks={self.tasks}", "--agent.deadline_s=20",
                    f"--agent.use={ROOT}/benchmarks/raising_solver.py:{agent}", *environments,
                ],
                cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        self.starts += 1

    def ended(self, within_s: float) -> bool:
        """Whether the trainer exits within the time; if so, its exit is counted and the run is audited."""
        assert self.process is not None
        try:
            code = self.process.wait(max(0.0, within_s))
        except subprocess.TimeoutExpired:
            return False
        self.exits[code] += 1
        self.process = None
        if (self.run_dir / "ledger.jsonl").exists():
            for finding in audit_run(self.run_dir).findings:
                self.findings.append(finding)
                print(f"after start {self.starts}, exit code {code}: {finding}", file=sys.stderr)
        if code == 0:
            self.steps += 4  # the run completed before the last kill
        return True

    def owned(self) -> dict[str, int]:
        """Pids of the running processes, by name."""
        if self.process is None:
            return {}
        found = {"trainer": self.process.pid}
        for child, command in children(self.process.pid):
            for name, word in {**MARKS, "engine": "tinker" if self.tinker else "engine"}.items():
                if f"\0tidegate\0{word}\0".encode() in command:
                    found[name] = child
        for child, command in children(found.get("environments", 0)):
            if b"tidegate.envs.service.worker" in command:
                found["environment_worker"] = child
        return found

    # ------------------------------------------------------------------ pieces

    def recall(self) -> None:
        """Loads the state of the previous piece, if there is one."""
        if not self._state.exists():
            return
        known = json.loads(self._state.read_text())
        self.starts, self.seconds, self.unreached = known["starts"], known["seconds"], known["unreached"]
        self.findings = known.get("findings", [])
        self.exits = Counter({int(code): number for code, number in known["exits"].items()})
        self.killed, self.steps = Counter(known["killed"]), max(self.steps, known["steps"])
        self.rng.seed(f"{known['seed']}/{self.starts}")

    def remember(self, seed: int, seconds: float) -> None:
        known = {
            "seed": seed, "starts": self.starts, "seconds": self.seconds + seconds, "steps": self.steps,
            "exits": self.exits, "killed": self.killed, "unreached": self.unreached,
            "findings": self.findings,
        }  # fmt: skip
        self._state.write_text(json.dumps(known))

    @property
    def _state(self) -> Path:
        return self.run_dir.parent / "chaos.json"

    # ------------------------------------------------------------------ the phases

    def failpoints(self, trainer: list[str], gateway: list[str], until: float) -> None:
        """Kills the process at each of these failpoints once; skips those not reached for a while."""
        while time.monotonic() < until and (
            left := [one for one in trainer + gateway if one not in {*self.passed, *self.unreached}]
        ):
            mine = {one: self.rng.choice([1, 1, 2, 3, 5, 8]) for one in left if one in trainer}
            theirs = [one for one in left if one in gateway]
            some = self.rng.sample(theirs, min(AT_ONCE, len(theirs)))
            self.start(mine | {one: self.rng.choice([1, 2, 5]) for one in some})
            seen, since = len(self.passed), time.monotonic()
            while self.process is not None and not self.ended(0.2):
                if len(self.passed) > seen:
                    seen, since = len(self.passed), time.monotonic()
                done = not mine and not set(some) - self.passed
                if done or time.monotonic() > min(since + QUIET_S, until):
                    self.kill("trainer", counted=False)
            if time.monotonic() - since > QUIET_S and seen == len(self.passed):
                self.unreached += left

    def random_kills(self, number: int, until: float) -> None:
        while self.killed.total() < number and time.monotonic() < until:
            if self.process is None:
                if self.starts:  # a run without a step left exits at once
                    self.steps = max(self.steps, last_step(self.run_dir) + 1)
                self.start({})
                if self.rng.random() < WHILE_TRAINING:
                    self._under_way(min(until, time.monotonic() + STARTED_S))
            if self.process is None or self.ended(self.rng.uniform(0.3, 7.0)):
                continue
            there = self.owned()
            self.kill(self.rng.choice([name for name in PROCESSES if name in there]))

    def _under_way(self, until: float) -> None:
        """Waits until the run just started has written to its ledger."""
        book = self.run_dir / "ledger.jsonl"
        before = book.stat().st_size if book.exists() else 0
        while self.process is not None and time.monotonic() < until:
            if self.ended(0.1) or (book.exists() and book.stat().st_size > before):
                return

    def kill(self, name: str, *, counted: bool = True) -> None:
        pid = self.owned().get(name)
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        self.killed[name] += counted
        if name == "trainer":
            self.ended(STARTED_S)

    def to_the_end(self, steps: int, places: list[str], until: float) -> bool:
        """Restarts the run until it exits as complete; whether that happened in time."""
        complete = self.exits[0]
        self.kill("trainer", counted=False)  # a process of an earlier phase has none of these armed
        while time.monotonic() < until:
            if self.process is None:
                left = [one for one in places if one not in self.passed]
                # A run without a step left has nothing to write at its end.
                self.steps = max(steps, last_step(self.run_dir) + bool(left))
                self.start(dict.fromkeys(left, 1))
            if self.ended(1.0) and self.exits[0] > complete:
                return True
        return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def children(pid: int) -> list[tuple[int, bytes]]:
    """Pids and command lines of the processes that a process started."""
    found = []
    with contextlib.suppress(OSError):  # it has exited, or there is none
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                found.append((int(child), Path(f"/proc/{child}/cmdline").read_bytes()))
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--failpoints", help="names, separated by commas; default: all")
    parser.add_argument("--reward", type=float, default=0.90, help="minimum held-out reward at the end")
    parser.add_argument("--tasks", type=int, default=64, help="held-out problems per set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stateful", action="store_true", help="each episode has a state and a tool")
    parser.add_argument("--policies", action="store_true", help="a solver and a verifier are trained")
    parser.add_argument("--tinker", action="store_true", help="train at a stand-in for a Tinker service")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the run")
    parser.add_argument("--for", dest="seconds", type=float, default=1500.0, help="duration of this piece")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    trainer = [f"{write}.{when}" for write in WRITES for when in ("before", "after")]
    trainer += TINKER if arguments.tinker else ()
    gateway = [f"{write}.{when}" for write in GATEWAY for when in ("before", "within", "after")]
    last = [f"{write}.{when}" for write in LAST for when in ("before", "after")]
    if arguments.failpoints is not None:
        wanted = set(filter(None, arguments.failpoints.split(",")))
        if unknown := wanted - {*trainer, *gateway, *last}:
            parser.error(f"unknown failpoints: {', '.join(sorted(unknown))}")
        trainer, gateway, last = ([one for one in some if one in wanted] for some in (trainer, gateway, last))
    with place(arguments.keep, "chaos") as directory:
        return endure(directory, (trainer, gateway, last), rng, arguments)


def endure(
    directory: Path, points: tuple[list[str], ...], rng: random.Random, arguments: argparse.Namespace
) -> int:
    """Kills and restarts the run until all is done or the time is over."""
    trainer, gateway, last = points
    chaos = Chaos(
        directory / "run", arguments.steps, arguments.tasks, rng, arguments.stateful, arguments.policies,
        arguments.tinker,
    )  # fmt: skip
    chaos.recall()
    began = time.monotonic()
    until = began + arguments.seconds
    try:
        chaos.failpoints(trainer, gateway, until)
        chaos.random_kills(arguments.kills, until)
        complete = chaos.to_the_end(arguments.steps, last, until)
        chaos.stop()
        chaos.remember(arguments.seed, time.monotonic() - began)
        if not complete:
            left = len({*trainer, *gateway} - chaos.passed)
            print(f"not complete after {chaos.starts} starts: {left} failpoints and "
                  f"{arguments.kills - chaos.killed.total()} kills remain; continue with the same --keep",
                  file=sys.stderr)  # fmt: skip
            return UNFINISHED
        return conclude(chaos, {*trainer, *gateway, *last}, arguments)
    finally:
        chaos.stop()


def conclude(chaos: Chaos, planned: set[str], arguments: argparse.Namespace) -> int:
    found = lineage_of(chaos.run_dir, GROUPS_PER_BATCH)
    at_end = audit_run(chaos.run_dir).findings
    missed = sorted(planned - chaos.passed)
    lines = metrics_of(chaos.run_dir)
    silent = set(range(found.steps + 1)) - {line["step"] for line in lines}
    others = sum(number for code, number in chaos.exits.items() if code not in (0, -9, GAVE_UP))
    for problem in [*found.lost[:10], *found.doubled[:10], *at_end[:10]]:
        print(problem, file=sys.stderr)
    results = {
        "seconds": round(json.loads((chaos.run_dir.parent / "chaos.json").read_text())["seconds"], 1),
        "steps": found.steps,
        "starts": chaos.starts,
        "failpoints": len(planned) - len(missed),
        **{f"killed_{name}": chaos.killed[name] for name in PROCESSES},
        "groups_trained": len(found.groups),
        "put_back": found.put_back,
        **({"missed": " ".join(missed)} if missed else {}),
    }
    checks = [
        Check("lost", float(len(found.lost)), "==", 0),
        Check("doubled", float(len(found.doubled)), "==", 0),
        Check("reward", lines[-1].get("eval/reward"), ">=", arguments.reward),
        Check("audit_findings", float(len(chaos.findings) + len(at_end)), "==", 0),
        Check("failpoints_missed", float(len(missed)), "==", 0),
        Check("kills", float(chaos.killed.total()), "==", arguments.kills),
        Check("other_exits", float(others), "==", 0),
        Check("steps_without_metrics", float(len(silent)), "==", 0),
    ]  # fmt: skip
    if chaos.policies:
        checks.append(Check("policies_apart", float(policies_apart(chaos.run_dir)), "==", 0))
    return report([results], checks, as_json=arguments.json)


def policies_apart(run_dir: Path) -> int:
    """Number of checkpoints of which a policy has taken other steps than those of the directory's name."""
    import torch

    apart = 0
    for path in checkpoints.committed(run_dir).values():
        files = [path / name / checkpoints.TRAINER_STATE for name in ("solver", "verifier")]
        taken = {torch.load(file, weights_only=True)["steps"] for file in files}
        apart += taken != {int(path.name.removeprefix("step_"))}
    return apart


if __name__ == "__main__":
    sys.exit(main())
