"""Waits that end at a stop, and waits that do not end before their work."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.trainer.waits import run_to_completion, unless_stopped


@pytest.mark.parametrize("fails", [False, True])
async def test_work_is_waited_for_however_often_the_caller_is_cancelled(fails: bool) -> None:
    may_end = asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        if fails:
            raise OSError("no space left on device")

    caller = asyncio.create_task(run_to_completion(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(OSError if fails else asyncio.CancelledError):
        await caller


async def test_a_failure_of_work_that_a_stop_ends_is_raised() -> None:
    """A write to a file is not abandoned, and may fail once the run is to stop."""
    stop, may_end = asyncio.Event(), asyncio.Event()

    async def write() -> None:
        await may_end.wait()
        raise OSError("no space left on device")

    waiting = asyncio.create_task(unless_stopped(stop, run_to_completion(write())))
    await asyncio.sleep(0)
    stop.set()
    may_end.set()
    with pytest.raises(OSError, match="no space"):
        await waiting


async def test_work_that_a_stop_ends_has_no_result() -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(unless_stopped(stop, asyncio.sleep(60)))
    await asyncio.sleep(0)
    stop.set()
    assert await waiting is None
