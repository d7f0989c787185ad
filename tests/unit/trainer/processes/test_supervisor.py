"""The exit of a component ends the job with its reason; cleanup completes even when cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest

from tidegate.errors import EngineError, NoProgressError
from tidegate.trainer.processes.supervisor import TaskSupervisor, watchdog
from tidegate.trainer.waits import run_to_completion, unless_stopped


async def fails(after: asyncio.Event | None = None) -> None:
    if after is not None:
        await after.wait()
    raise EngineError("the engine is gone")


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_it_may_be_made_in_a_thread_without_an_event_loop() -> None:
    guard = await asyncio.to_thread(TaskSupervisor)
    guard.watch(fails(), "engine")
    with pytest.raises(EngineError, match="is gone"):
        await asyncio.wait_for(guard.run(for_ever()), 5)
    await guard.close()


async def test_a_failing_component_ends_the_job() -> None:
    guard, go, ended = TaskSupervisor(), asyncio.Event(), asyncio.Event()

    async def job() -> None:
        go.set()
        try:
            await for_ever()
        finally:
            ended.set()

    guard.watch(fails(go), "engine")
    with pytest.raises(EngineError, match="is gone"):
        await asyncio.wait_for(guard.run(job()), 5)
    assert ended.is_set()
    await guard.close()


async def test_a_component_that_failed_before_the_job_is_noticed() -> None:
    guard = TaskSupervisor()
    await asyncio.wait([guard.watch(fails(), "engine")])
    with pytest.raises(EngineError):
        await asyncio.wait_for(guard.run(for_ever()), 5)


async def test_a_component_that_ends_or_is_cancelled_does_not_end_the_job() -> None:
    guard = TaskSupervisor()

    async def done() -> None:
        pass

    async def job() -> int:
        guard.watch(for_ever(), "c").cancel()
        await asyncio.wait([guard.watch(done(), "a")])
        return 7

    assert await guard.run(job()) == 7
    await guard.close()


async def test_closing_cancels_and_waits() -> None:
    guard, cleaned = TaskSupervisor(), []

    async def component() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    task = guard.watch(component(), "component")
    await asyncio.sleep(0)
    await guard.close()
    assert task.cancelled()
    assert cleaned == [True]


async def test_the_message_of_the_watchdog_names_what_is_waited_for() -> None:
    long_ago = time.monotonic() - 100
    with pytest.raises(NoProgressError, match=r"no progress for 100 s .* waits for 3 groups"):
        await watchdog(50, lambda: long_ago, lambda: "the trainer waits for 3 groups", check_s=0)


async def test_the_watchdog_is_quiet_while_something_moves() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watchdog(50, time.monotonic, lambda: "", check_s=0), 0.05)


async def test_whole_runs_to_its_end_when_cancelled() -> None:
    begun, go, steps = asyncio.Event(), asyncio.Event(), []

    async def indivisible() -> None:
        begun.set()
        await go.wait()
        steps.append("done")

    task = asyncio.create_task(run_to_completion(indivisible()))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["done"]


async def test_an_error_in_what_is_whole_is_not_lost_by_a_cancellation() -> None:
    go = asyncio.Event()
    task = asyncio.create_task(run_to_completion(fails(go)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(EngineError):
        await task


async def test_unless_stopped_cancels_the_wait() -> None:
    stop, cancelled = asyncio.Event(), []

    async def waited() -> int:
        try:
            await for_ever()
        finally:
            cancelled.append(True)
        return 1

    task = asyncio.create_task(unless_stopped(stop, waited()))
    await asyncio.sleep(0)
    stop.set()
    assert await task is None
    assert cancelled == [True]


async def test_unless_stopped_returns_the_result_and_raises_the_error() -> None:
    async def five() -> int:
        return 5

    assert await unless_stopped(asyncio.Event(), five()) == 5
    with pytest.raises(EngineError):
        await unless_stopped(asyncio.Event(), fails())
