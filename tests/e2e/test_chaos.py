"""A short kill test: trainer and gateway at a write, one process at random; no episode is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO

pytestmark = pytest.mark.slow
PLACES = {
    "--stateful": ("checkpoint.marker.before", "leased.within"),
    "--tinker": ("tinker.backward", "tinker.step", "tinker.state", "tinker.sampler", "tinker.deleted"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_no_group_is_lost_or_trained_on_twice_under_random_kills(tmp_path: Path, kind: str) -> None:
    small = [kind, "--steps=2", "--kills=1", "--tasks=4", "--reward=0", f"--keep={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--json", *small, f"--failpoints={','.join(PLACES[kind])}"],
        cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr, (tmp_path / "out").read_text()[-3000:])
    told = json.loads(done.stdout.splitlines()[-1])
    checks = {one["name"]: one["value"] for one in told["checks"]}
    assert (checks["lost"], checks["doubled"], checks["kills"], checks["failpoints_missed"]) == (0, 0, 1, 0)
