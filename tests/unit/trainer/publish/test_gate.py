"""The gate before a publish: which conversations hold it up, and what opens it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tidegate.config import TrainerSettings
from tidegate.errors import GatewayError
from tidegate.gateway.client import GroupRow
from tidegate.trainer.publish import gate as module
from tidegate.trainer.publish.gate import PublishGate


@dataclass
class Listing:
    """A gateway whose groups are listed, one listing after the other; the last one stays."""

    listings: list[Any]
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def list_groups(self) -> list[GroupRow]:
        self.asked.set()
        now = self.listings.pop(0) if len(self.listings) > 1 else self.listings[0]
        if isinstance(now, GatewayError):
            raise now
        return [
            GroupRow(
                f"g{number}", "live" if state == "ended" else state, oldest, [], unended=int(state == "live")
            )
            for number, (state, oldest) in enumerate(now)
        ]


def gate(
    listings: list[Any], share: float | None = 0.5, bound: int | None = 2, longest_s: float = 600.0
) -> PublishGate:
    settings = TrainerSettings(max_staleness="none" if bound is None else bound)
    # As they are: without a bound a share is refused.
    settings = settings.model_copy(update={"max_stale_share": share, "gate_timeout_s": longest_s})
    return PublishGate(cast(Any, Listing(listings)), settings, asyncio.Event())


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        ([], 0.0),
        ([("live", 2), ("live", 3), ("live", None)], 1 / 3),
        ([("live", 3)], 0.0),
        ([("ready", 1), ("leased", 1), ("live", 3)], 0.0),
        ([("ended", 1), ("live", 3)], 0.0),
        ([("live", 1), ("live", 2)], 1.0),
    ],
)
async def test_unfinished_conversations_beyond_the_bound_are_counted(rows: list[Any], lost: float) -> None:
    assert await gate([rows]).lost_share(5) == pytest.approx(lost)


async def test_the_gate_opens_when_enough_conversations_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    stale, fresh = ("live", 0), ("live", 5)
    listings = [[stale, stale, fresh], GatewayError("it restarts"), [stale, fresh]]
    waiting = gate(listings)
    async with asyncio.timeout(10):
        await waiting.wait(5)
    assert listings == [[stale, fresh]], "it was asked until half of them were fresh"


async def test_the_end_of_the_run_opens_the_gate() -> None:
    closed = gate([[("live", 0)]])
    waiting = asyncio.create_task(closed.wait(5))
    await cast(Listing, closed.gateway).asked.wait()
    assert closed.waiting, "the watchdog must know"
    assert not waiting.done()
    closed.stop.set()
    async with asyncio.timeout(10):
        await waiting


@pytest.mark.parametrize(("share", "bound"), [(None, 2), (0.0, None)])
async def test_without_a_share_or_a_bound_the_gate_is_open(share: float | None, bound: int | None) -> None:
    async with asyncio.timeout(10):
        await gate([[("live", 0)]], share, bound).wait(5)


async def test_the_gate_opens_after_its_longest_wait() -> None:
    closed = gate([[("live", 0)]], longest_s=0.01)
    async with asyncio.timeout(10):
        await closed.wait(5)
    assert not closed.waiting
