"""Settings of glibc's allocator: freed memory is returned, or used again by other threads."""

from __future__ import annotations

import platform
import subprocess
import sys
from unittest.mock import Mock

import pytest

from tests import REPO
from tidegate.config import TrainerSettings
from tidegate.trainer.policy import policy

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="they are settings of glibc")
MEASURE = """
import re, sys, threading
from pathlib import Path
def megabytes():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
def fill(size, number):  # small blocks between the large ones prevent that freed ones are returned
    blocks = [(b"x" * (size + one), b"y" * 1000 + bytes([one])) for one in range(number)]
    kept.extend(small for _, small in blocks)
kept = []
"""
RETURNED = """
from tidegate.service.heap import return_freed_memory
if sys.argv[1] == "set":
    return_freed_memory()
before = megabytes()
bytearray(b"x") * (20 * 2**20)  # its end raises glibc's own threshold
fill(2**21, 100)
print(megabytes() - before)
"""
SHARED = """
from concurrent.futures import ThreadPoolExecutor
from tidegate.service.heap import share_one_heap
if sys.argv[1] == "set":
    share_one_heap()
threads = [ThreadPoolExecutor(1) for _ in range(6)]
bytearray(b"x") * (20 * 2**20)
before = megabytes()
for thread in threads:
    thread.submit(fill, 300_000, 100).result()
print(megabytes() - before)
"""


def growth(code: str, how: str) -> float:
    command = [sys.executable, "-c", MEASURE + code, how]
    return float(subprocess.run(command, cwd=REPO, capture_output=True, check=True, timeout=120).stdout)


def test_large_blocks_are_returned_to_the_system_when_they_are_freed() -> None:
    assert growth(RETURNED, "default") > 100 > 20 > growth(RETURNED, "set")


def test_threads_allocate_from_one_heap() -> None:
    assert growth(SHARED, "default") > 100 > 60 > growth(SHARED, "set")


def test_a_process_that_loads_a_policy_has_one_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Mock()
    monkeypatch.setattr(policy, "share_one_heap", shared)
    policy.Policy.load(REPO / "examples" / "tiny_base" / "model", TrainerSettings())
    shared.assert_called_once_with()
