"""Fault tests on a real Ray cluster: `python -m tests.ray_faults HOST:PORT`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

import pytest
import ray

from tests.ray_cluster import SEATS
from tidegate.config import load_settings
from tidegate.errors import StartError
from tidegate.trainer.cluster.actors import LostError, wait_for_reply
from tidegate.trainer.cluster.connect import ActorSlots, connected, reserved
from tidegate.trainer.cluster.placement import HOME, Placement


class Failing:
    def __init__(self) -> None:
        raise OSError("no room here")

    async def about(self) -> None: ...


class Dying:
    async def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> None:
        await asyncio.sleep(600)


def placement(*overrides: str) -> Placement:
    return Placement.of(load_settings(None, ["--model.path=x", *SEATS, *overrides]))


def too_much(home: str) -> None:
    with (
        pytest.raises(StartError) as refused,
        reserved("greedy", placement("--cluster.engine={CPU = 0.2, GPU = 8}"), home, 1),
    ):
        pass
    said = str(refused.value)
    assert "timed out after 1 s waiting for the Ray placement group" in said
    assert "8 GPU" in said
    assert "3 CPU" in said


async def lost(seats: ActorSlots) -> None:
    with pytest.raises(LostError, match="engine could not be created on its node: OSError: no room here"):
        await wait_for_reply(seats.create_actor("engine", Failing).about.remote(), "engine")
    actor = seats.create_actor("gateway", Dying, restarts=1)
    before = await wait_for_reply(actor.pid.remote(), "gateway")
    with pytest.raises(StartError, match="is on the cluster"):
        seats.create_actor("gateway", Dying)
    waiting = asyncio.create_task(wait_for_reply(actor.wait.remote(), "gateway", None))
    await asyncio.sleep(0)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(LostError, match="gateway was lost"):
        await waiting
    after = before
    async with asyncio.timeout(30):
        while after == before:  # while it restarts, the error may be that it is unavailable
            with contextlib.suppress(LostError):
                after = await wait_for_reply(actor.pid.remote(), "gateway")
    with pytest.raises(LostError, match="did not respond within 0"):
        await wait_for_reply(seats.create_actor(HOME, Dying).wait.remote(), "gateway", 0.1)


def nothing_reserved() -> None:
    """Checks that earlier runs left no reservation; Ray removes ended ones after a short delay."""
    deadline = time.monotonic() + 20

    def left() -> list[object]:
        groups = ray.util.placement_group_table().values()
        actors = ray.util.list_named_actors(all_namespaces=True)
        return [*actors, *(one for one in groups if one["state"] != "REMOVED")]

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)  # polling other processes
    assert left() == []


def main(address: str) -> None:
    with connected(address) as home:
        nothing_reserved()
        too_much(home)
        with reserved("faults", placement(), home, 30) as seats:
            asyncio.run(lost(seats))


if __name__ == "__main__":
    main(sys.argv[1])
