"""A pass, a publish and decode steps on an accelerator copy only what they must, and mix no devices."""

from __future__ import annotations

import json
import subprocess
import sys

from tests import REPO

COPIES = 16
"""Largest number of tensors that a microbatch copies to the accelerator: its fields, and its prefix."""


def test_a_pass_copies_its_microbatch_and_a_decode_step_its_tokens() -> None:
    command = [sys.executable, "-m", "tests.fake_accelerator"]  # it registers a device, for its process
    ran = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["microbatches"] >= 2
    assert 0 < len(told["to_device"]) <= COPIES * told["microbatches"], told["to_device"]
    assert told["to_host"] == []
    assert told["published"] == []
    assert len(told["sampled"]) == told["decoded"], told["sampled"]
