"""Short outages in small runs: no task is quarantined, no episode lost or trained on twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO

pytestmark = pytest.mark.slow
SMALL = [
    "--alone", "--steps=4", "--seconds=20", "--trainer.groups_per_batch=4", "--trainer.group_size=4",
    "--eval.tasks=16", "--eval.every=0", "--trainer.checkpoint_every=2",
]  # fmt: skip


@pytest.mark.parametrize("part", ["engines", "retrieval"])
def test_a_short_outage_spends_no_task(tmp_path: Path, part: str) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/outage.py", "--json", *SMALL, f"--only={part}", f"--keep={tmp_path}"],
        cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.stdout, (done.stderr, (tmp_path / f"{part}-outage" / "out").read_text()[-3000:])
    told = json.loads(done.stdout.splitlines()[-1])
    checks = {one["name"].removeprefix(f"{part}_"): one["value"] for one in told["checks"]}
    assert [checks[one] for one in ("quarantined", "lost", "doubled", "exit")] == [0, 0, 0, 0], told
