"""A trainer rank's process that reads nothing does not block its owner."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tidegate.trainer.processes import rank_process
from tidegate.trainer.processes.rank_process import LocalRankProcess

BATCH = bytes(1_000_000)
"""More than a pipe holds."""
DEAF = "import signal; signal.pause()"
READS = f"import pickle; sys.exit(3 if len(pickle.load(sys.stdin.buffer)) == {len(BATCH)} else 4)"


class Program(LocalRankProcess):
    """Runs other code, which is ready at once."""

    code = DEAF

    def command(self) -> Sequence[str]:
        return (sys.executable, "-c", f"import sys; print('ready', flush=True); {self.code}")


Start = Callable[[str, float], AbstractAsyncContextManager[Program]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(rank_process, "STOP_S", 0.1)

    @asynccontextmanager
    async def started(code: str, timeout_s: float) -> AsyncIterator[Program]:
        process = Program(1, tmp_path, timeout_s)
        process.code = code
        await process.start()
        try:
            yield process
        finally:
            async with asyncio.timeout(5):
                await process.stop()

    return started


async def test_a_batch_that_is_more_than_a_pipe_holds_arrives_whole(start: Start) -> None:
    async with start(READS, 10) as process:
        await asyncio.to_thread(process.send, BATCH)
        assert "trainer rank 1 ended with exit code 3" in await process.wait_for_exit()


async def test_a_rank_that_reads_nothing_is_named_when_patience_ends(start: Start) -> None:
    async with start(DEAF, 0.2) as process, asyncio.timeout(5):
        with pytest.raises(TimeoutError, match=r"trainer rank 1 has read nothing for 0\.2 s"):
            await asyncio.to_thread(process.send, BATCH)


async def test_stopping_releases_a_caller_blocked_on_a_rank_that_reads_nothing(start: Start) -> None:
    async with start(DEAF, 600) as process, asyncio.timeout(5):
        telling = asyncio.create_task(asyncio.to_thread(process.send, BATCH))
        while not process._sending.locked():  # noqa: ASYNC110 - in a thread, which says nothing
            await asyncio.sleep(0)
        await process.stop()
        with pytest.raises(BrokenPipeError):
            await telling
        with pytest.raises(BrokenPipeError, match="trainer rank 1 was stopped"):
            process.send(b"")
