"""Waits that do not end before their work."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.trainer.waits import run_to_completion


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
