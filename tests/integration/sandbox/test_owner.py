"""The end of the process that owns sandboxes: nothing of them remains."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.sandboxes import needs_bubblewrap, with_words
from tests.waiting import eventually
from tidegate.errors import SandboxError
from tidegate.sandbox import SandboxPool
from tidegate.sandbox.owned import PREFIX, remove_orphans

OWNER = """
import asyncio, sys
from tidegate.sandbox import open_sandbox
async def main():
    async def use():
        while True:
            async with await open_sandbox(backend=sys.argv[1]) as box:
                print("opened", flush=True)
                await box.run("sleep 900 & setsid sh -c 'sleep 900; : " + sys.argv[2] + "' & exit")
    await asyncio.gather(*(use() for _ in range(4)))
asyncio.run(main())
"""


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def supervisors() -> set[int]:
    return set(with_words("tidegate.sandbox.inside.supervisor"))


@pytest.mark.parametrize(
    "backend", [pytest.param("bubblewrap", marks=needs_bubblewrap), pytest.param("none")]
)
async def test_an_owner_that_is_killed_leaves_nothing(backend: str) -> None:
    word, rng = secrets.token_hex(8), random.Random(7)
    before, folders_before = supervisors(), folders()
    for _ in range(2):
        owner = subprocess.Popen(  # noqa: ASYNC220 - it is killed
            [sys.executable, "-c", OWNER, backend, word], stdout=subprocess.PIPE
        )
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == b"opened\n"
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    await eventually(lambda: not with_words(word) and supervisors() <= before)
    remove_orphans()
    assert folders() <= folders_before


@needs_bubblewrap
async def test_a_pool_keeps_fresh_sandboxes_and_replaces_those_that_end() -> None:
    before = supervisors()
    async with SandboxPool(size=2) as pool:
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
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await third.run("sleep 60")
            assert time.monotonic() - began < 5
    with pytest.raises(SandboxError, match="not open"):
        async with pool.take():
            pass
    await eventually(lambda: supervisors() <= before)


async def test_a_pool_that_cannot_start_a_sandbox_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="bwrap"):
        async with SandboxPool(size=1):
            pass
