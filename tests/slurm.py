"""A job of examples/slurm/train.sbatch on loopback, with stand-ins for `srun` and `scontrol`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.checks.commands import workplace
from tests import REPO
from tests.e2e.runs import ENVIRONMENT

SCRIPT = REPO / "examples" / "slurm" / "train.sbatch"
SRUN = """#!/usr/bin/env bash
for word in "$@"; do
  case $word in --nodelist=*) export SLURMD_NODENAME=${word#*=} ;; esac
done
while [[ $1 == --* ]]; do shift; done
set -m  # a process group, so that each process of the step gets the signal, as from Slurm
"$@" &
echo $! >>steps
trap 'kill -TERM -- -$!' TERM
wait $!
wait $!
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
  show) tr , '\\n' <<<"$3" ;;
  requeue) echo "$2" >>requeued ;;
esac
"""


def cluster(folder: Path) -> Path:
    """Makes a folder of a shared disk, with Slurm's commands and the script for loopback."""
    workplace(folder)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        command = folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(text)
        command.chmod(0o755)
    text = SCRIPT.read_text().replace(" --host=0.0.0.0", ' --host="$SLURMD_NODENAME"')
    script = folder / "job.sh"
    script.write_text(text.replace("--gateway.host=0.0.0.0", '--gateway.host="${nodes[0]}"'))
    assert "0.0.0.0" not in script.read_text()
    return script


@contextlib.contextmanager
def job(script: Path, nodes: list[str], *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Runs the batch script as Slurm does; its processes end with the block."""
    path = f"{script.parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {
        "SLURM_SUBMIT_DIR": str(script.parent), "SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_JOB_ID": "7",
        "PATH": path, **environment,
    }  # fmt: skip
    with (script.parent / "job.log").open("a") as log:
        running = subprocess.Popen(
            ["bash", str(script), *words],
            env={**ENVIRONMENT, **slurm}, stdout=log, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        yield running
    finally:
        steps = script.parent / "steps"
        for group in [running.pid, *map(int, steps.read_text().split() if steps.exists() else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        running.wait(30)
