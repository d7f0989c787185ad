"""A hostile client attacks a small service with two honest keys, which notice nothing."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO

HOLDS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}
SMALL = ["--conversations=300", "--deletes=2000", "--connections=200", "--settle=5"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a service with its processes
def test_two_honest_keys_notice_nothing_of_a_hostile_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/hostile.py", "--json", *SMALL, f"--keep={tmp_path}"],
        cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.stdout, (done.stderr[-3000:], (tmp_path / "out").read_text()[-3000:])
    told = json.loads(done.stdout.splitlines()[-1])
    failed = [
        one
        for one in told["checks"]
        # At this size most of the growth is what the allocator keeps of a few large bodies.
        if one["name"] != "rss_growth_mb" and not HOLDS[one["op"]](one["value"], one["goal"])
    ]
    assert not failed, told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_its_processes_end_with_it(number: signal.Signals) -> None:
    program = (
        "import signal, time; from hostile_world import started\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "print(started(['sleep', '300'], None).pid, flush=True); time.sleep(300)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=REPO / "benchmarks", stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        child = os.pidfd_open(int(benchmark.stdout.readline()))
        benchmark.send_signal(number)
        try:
            ended, _, _ = select.select([child], [], [], 30)
            assert ended, "it still runs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
