"""The benchmark's attempts to leave a sandbox: each fails in it, and succeeds without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import REPO
from tests.sandboxes import needs_bubblewrap

SCRIPT = [sys.executable, "benchmarks/sandbox.py", "--json", "--sandboxes", "60", "--starts", "5"]


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="without protection, some attempts succeed for root only")
def test_no_attempt_succeeds_and_every_attempt_could() -> None:
    ended = subprocess.run(SCRIPT, cwd=REPO, capture_output=True, text=True, timeout=1200)
    counted = {one["name"]: one["value"] for one in json.loads(ended.stdout.splitlines()[-1])["checks"]}
    assert counted.pop("warm_start_ms") > 0
    assert counted.pop("attempts") >= 90
    assert counted == {"escapes": 0, "unproven": 0, "leaked_processes": 0, "leaked_dirs": 0}, ended.stdout
