"""The end of the process that owns sandboxes: nothing of them remains."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.sandboxes import needs_bubblewrap, with_words
from tests.waiting import eventually
from tidegate.errors import SandboxError
from tidegate.sandbox import SandboxLimits, SandboxPool
from tidegate.sandbox.owned import PREFIX, remove_orphans

OWNER = """
import asyncio, sys
from tidegate.sandbox import SandboxLimits, open_sandbox
backend, mark = sys.argv[1:]
async def use():
    while True:
        async with await open_sandbox(SandboxLimits(cpu_s=int(mark)), backend) as box:
            print("opened", flush=True)
            await box.run(f"sleep 900 & setsid sh -c 'sleep 900; : {mark}' & exit")
async def main():
    await asyncio.gather(*(use() for _ in range(4)))
asyncio.run(main())
"""
STARTING = """
import asyncio, os, sys
from tidegate.sandbox import SandboxLimits, bubblewrap, open_sandbox, supervised
async def end(*_): os.kill(os.getpid(), 9)
place, mark = sys.argv[1:]
if place == "prepare": bubblewrap.BubblewrapSandbox._prepare = end
else: supervised._receive_sockets = end
asyncio.run(open_sandbox(SandboxLimits(cpu_s=int(mark))))
"""


@pytest.fixture
def mark() -> int:
    """A limit that shows which processes belong to the test: it is on the command line of a sandbox."""
    return 10**8 + secrets.randbelow(10**9)


@pytest.mark.parametrize(
    "backend", [pytest.param("bubblewrap", marks=needs_bubblewrap), pytest.param("none")]
)
async def test_an_owner_that_is_killed_leaves_nothing(backend: str, mark: int) -> None:
    rng = random.Random(7)
    for _ in range(2):
        owner = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OWNER, backend, str(mark), stdout=subprocess.PIPE
        )
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"opened\n"
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        owner.kill()
        await owner.wait()
        await eventually(lambda: not with_words(str(mark)))
        remove_orphans()
        assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*-{owner.pid}-*"))  # noqa: ASYNC240


@needs_bubblewrap
@pytest.mark.parametrize("place", ["prepare", "receive"])
async def test_an_owner_that_is_killed_during_a_start_leaves_nothing(
    place: str, mark: int, tmp_path: Path
) -> None:
    slow, ended = tmp_path / "bwrap", tmp_path / "ended"
    slow.write_text(f'#!/bin/sh\nsleep 0.2\n{shutil.which("bwrap")} "$@"\ntouch {ended}\n')
    slow.chmod(0o755)
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STARTING,
        place,
        str(mark),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert await owner.wait() == -signal.SIGKILL
    await eventually(ended.exists)
    await eventually(lambda: not with_words(str(mark)))


@needs_bubblewrap
async def test_a_pool_keeps_fresh_sandboxes_and_replaces_those_that_end(mark: int) -> None:
    async with SandboxPool(SandboxLimits(cpu_s=mark), size=2) as pool:
        await eventually(lambda: pool.waiting == 2)
        async with pool.take({"file": "1"}) as first, pool.take() as second:
            assert (await first.run("cat file")).stdout == "1"
            assert (await second.run("ls")).stdout == ""
            await eventually(lambda: pool.waiting == 2)
        assert first.closed
        box = pool._warm[0]
        box._process.kill()  # type: ignore[attr-defined]
        await eventually(lambda: box.closed)
        async with pool.take() as third:
            assert third is not box
            assert (await third.run("true")).ok
    assert not with_words(str(mark))
    with pytest.raises(SandboxError, match="not open"):
        async with pool.take():
            pass


async def test_a_pool_that_cannot_start_a_sandbox_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="bwrap"):
        async with SandboxPool(size=1):
            pass
