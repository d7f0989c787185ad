"""Runs of `tidegate train` as a process, with the bundled base model and few steps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import REPO
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.audit_check import Audit
from tidegate.trainer.ledger.ledger import read_ledger

DEMO = REPO / "examples" / "demo" / "config.toml"
SMALL = [
    "--run.live_view=false", "--trainer.groups_per_batch=4", "--trainer.group_size=4", "--eval.tasks=16",
    "--eval.interim_tasks=8", "--agent.max_concurrency=32", "--trainer.checkpoint_every=2",
    "--agent.deadline_s=120",  # on shared cores an episode may take more than the demo's 30 s
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class TrainProcess:
    """A training process, with its output in `log`."""

    def __init__(
        self,
        run_dir: Path,
        arguments: Sequence[str],
        *,
        config: Path = DEMO,
        environment: Mapping[str, str] = ENVIRONMENT,
        before: Callable[[], None] | None = None,
        small: Sequence[str] = SMALL,
        command: str = "train",
    ) -> None:
        self.run_dir = run_dir
        self.log = run_dir.parent / f"{run_dir.name}.out"
        place = [f"--run.dir={run_dir.parent}", f"--run.name={run_dir.name}"]
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidegate", command, str(config), *place, *small, *arguments],
                cwd=REPO, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment,
                preexec_fn=before,
            )  # fmt: skip

    def wait(self, timeout: float = 300) -> int:
        """The exit code; fails with the output if the process has not ended after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no exit within {timeout} s: {self.output()[-3000:]}") from None

    def output(self) -> str:
        return self.log.read_text()

    def until_step(self, step: int, timeout: float = 300) -> None:
        """Waits until metrics.jsonl has the step's line; fails if the process exits before."""
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in metrics(self.run_dir)):
            assert self.process.poll() is None, self.output()[-3000:]
            assert time.monotonic() < deadline, f"no step {step} within {timeout} s: {self.output()[-3000:]}"
            time.sleep(0.05)  # polling a file that another process writes

    def until_said(self, words: str, timeout: float = 180, times: int = 1) -> None:
        """Waits until the output contains `words` at least `times` times."""
        deadline = time.monotonic() + timeout
        while self.output().count(words) < times:
            assert time.monotonic() < deadline, f"never said {words!r}: {self.output()[-3000:]}"
            time.sleep(0.02)  # polling a file that another process writes

    def until(self, holds: Callable[[], bool], timeout: float = 180) -> None:
        """Waits until `holds` is true; fails if the process exits before."""
        deadline = time.monotonic() + timeout
        while not holds():
            assert self.process.poll() is None, self.output()[-3000:]
            assert time.monotonic() < deadline, self.output()[-3000:]
            time.sleep(0.1)  # polling another process

    def owned(self, name: str) -> int:
        """The pid of the run's `engine`, `engine-1` or `gateway`, or of a service's `trainer`."""
        found: int = json.loads((self.run_dir / "logs" / f"{name}.address").read_text())["pid"]
        return found

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def training(
    run_dir: Path,
    *arguments: str,
    config: Path = DEMO,
    environment: Mapping[str, str] = ENVIRONMENT,
    before: Callable[[], None] | None = None,
    small: Sequence[str] = SMALL,
    command: str = "train",
) -> Iterator[TrainProcess]:
    """Runs a training process, or a standing service (`serve`), which is killed at the end of the block.

    `before` is called in the process first.
    """
    options: dict[str, Any] = {"config": config, "environment": environment, "before": before, "small": small}
    run = TrainProcess(run_dir, arguments, command=command, **options)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.kill()


STARTS = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM
from tidegate.cli import main
config, resume, *command = sys.argv[1:]
codes = []
while not codes or codes[-1] == -9:
    more = [resume] if resume and os.path.exists(config) else []
    child = os.fork()
    if not child:
        os._exit(main([*command, *more]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def start_until_complete(
    run_dir: Path, *command: str, environment: Mapping[str, str], resume: str = ""
) -> list[int]:
    """Exit codes of a command that is started again after each SIGKILL, with `resume` once the run exists.

    Each start is a fork of one process, which imports torch only once.
    """
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(run_dir / "config.toml"), resume, *command],
        cwd=REPO, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    assert codes[-1] == 0, done.stderr[-3000:]
    return codes


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def held(run_dir: Path) -> Audit:
    """The run's audit, which must pass."""
    audit = audit_run(run_dir)
    assert audit.consistent, audit.findings
    return audit


def ends(run_dir: Path) -> list[tuple[str, str | None]]:
    """The status and the reason of each end of the run."""
    entries = read_ledger(run_dir / "ledger.jsonl")
    return [(one["status"], one["why"]) for one in entries if (one["kind"], one["event"]) == ("run", "ended")]


def gone(pid: int, timeout: float = 60) -> bool:
    """Whether a process exits within the time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if _is_zombie(pid):
            return True
        time.sleep(0.05)  # polling another process
    return False


def _is_zombie(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


@contextlib.contextmanager
def server(verb: str, folder: Path, *arguments: str) -> Iterator[str]:
    """Runs `tidegate engine` or `tidegate gateway`; yields its URL."""
    announced, log = folder / f"{verb}.json", folder / f"{verb}.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", verb, *arguments, f"--announce={announced}"],
            cwd=REPO, stdout=out, stderr=out, env=ENVIRONMENT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not announced.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)  # polling a file that another process writes
        yield json.loads(announced.read_text())["url"]
    finally:
        process.kill()
        process.wait()
