"""Programs that exceed the limits of a bubblewrap sandbox: each ends, and the sandbox can still be used."""

from __future__ import annotations

import pytest

from tests.sandboxes import needs_bubblewrap
from tidegate.sandbox import SandboxLimits, open_sandbox, verify_fresh

pytestmark = needs_bubblewrap

LIMITS = SandboxLimits(memory_mb=128, processes=24, disk_mb=32, cpu_s=1, wall_s=20)
FORKS = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
MEMORY_OF_MANY = """
import os, time
for number in range(4): os.fork()
block = b'x' * 40_000_000
time.sleep(15)
"""
COUNT = "import os; print(sum(name.isdecimal() for name in os.listdir('/proc')))"
SHARED = """
import mmap, time
blocks = [mmap.mmap(-1, 30_000_000) for _ in range(20)]
for block in blocks: block.write(b'x' * 30_000_000)
time.sleep(15)
"""
BOTH_FOLDERS = """
import time
for number in range(20):
    open(f"{('/tmp', '/work')[number % 2]}/{number}", 'wb').write(b'x' * 2_500_000); time.sleep(0.02)
time.sleep(15)
"""


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        (FORKS, "processes"),
        (MEMORY_OF_MANY, "memory"),
        (SHARED, "memory"),
        (BOTH_FOLDERS, "disk"),
    ],
    ids=["fork bomb", "memory of many", "shared memory", "files in two folders"],
)
async def test_a_program_is_killed_for_its_limit(program: str, limit: str) -> None:
    async with await open_sandbox(LIMITS) as box:
        result = await box.run(["python3", "-c", program])
        assert (result.exit_code, result.limit, result.timed_out, result.ok) == (137, limit, False, False)
        assert (await box.run(["python3", "-c", COUNT])).stdout == "2\n", "the supervisor and this command"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import os; os.memfd_create('x')", "not implemented"),
        (
            "open('a', 'wb').write(bytes(30_000_000)); open('b', 'wb').write(bytes(30_000_000))",
            "No space left",
        ),
    ],
)
async def test_a_program_gets_an_error_of_the_system(program: str, error: str) -> None:
    async with await open_sandbox(LIMITS) as box:
        result = await box.run(["python3", "-c", program])
        assert error in result.stderr
        assert (result.exit_code, result.limit) == (1, None)


async def test_processor_time_is_limited() -> None:
    async with await open_sandbox(LIMITS) as box:
        result = await box.run("while :; do :; done")
        assert (result.exit_code, result.timed_out) == (137, False)


async def test_a_full_disk_can_be_cleaned_and_does_not_end_commands_that_add_nothing() -> None:
    async with await open_sandbox(LIMITS) as box:
        assert (await box.run(["python3", "-c", BOTH_FOLDERS])).limit == "disk"
        assert (await box.run("sleep 0.3; rm /tmp/* && echo removed")).stdout == "removed\n"
        with pytest.raises(OSError, match="No space left"):
            await box.write("more", bytes(30 << 20))


async def test_a_check_runs_without_what_the_agent_left() -> None:
    async with await open_sandbox(LIMITS, files={"answer": "wrong"}) as box:
        await box.run(
            "(while sleep 0.01; do echo right > answer; done) & mkdir /tmp/bin; ln -s /tmp/check expected"
        )
        await box.run("until grep -q right answer; do sleep 0.01; done")
        check = "echo wrong > answer; sleep 0.2; grep -q right answer || test -e expected || test -e /tmp/bin"
        assert (await box.run(check)).ok, "in the agent's own sandbox the check is misled"
        assert (await verify_fresh(box, check)).exit_code == 1
        assert (
            await verify_fresh(box, "cat /tmp/check/test answer", {"/tmp/check/test": "t "})
        ).stdout == "t right\n"


async def test_files_that_cannot_be_carried_over_do_not_pass() -> None:
    async with await open_sandbox(LIMITS) as box:
        await box.run("for n in 1 2 3 4; do truncate -s 20M sparse$n; done")
        result = await verify_fresh(box, "true")
        assert (result.exit_code, result.limit, result.ok) == (125, "files", False)
