"""A hostile client attacks a small service with two honest keys, which notice nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO

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
    assert done.returncode == 0, told
