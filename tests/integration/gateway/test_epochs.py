"""A trainer exits and another one takes over: what the gateway keeps for the second one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import Fault, Stage, eventually, staged
from tests.integration.gateway.test_journal import ASK, TASK, client_of, killed, model, talk
from tidegate.errors import GatewayError
from tidegate.gateway.client import SessionAccess
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.types import Outcome, to_wire

__all__ = ["model"]


@pytest.fixture
async def stage(model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(model, journal=tmp_path / "journal") as made:
        yield made


async def finished(stage: Stage, group_id: str, epoch: int | None) -> SessionAccess:
    access = await stage.client.open_session(task=TASK, group_id=group_id, slot=0, epoch=epoch)
    await talk(stage, access, 1)
    await stage.client.finish(access.session_id, reward=1.0)
    return access


async def outcomes(stage: Stage, sessions: list[SessionAccess]) -> list[Outcome | None]:
    """Of those that are over; None for one that goes on."""
    found = [stage.gateway.session(one.session_id) for one in sessions]
    for session in found:
        if session.finishing is not None:
            await session.finishing
    return [one.trajectory.outcome if one.trajectory is not None else None for one in found]


async def test_the_sessions_of_a_dead_trainer_end_cancelled_and_others_go_on(stage: Stage) -> None:
    mine = await stage.client.open_session(task=TASK, group_id="g1-1", slot=0, epoch=1)
    done = await finished(stage, "g1-1", 1)
    others = await stage.client.open_session(task=TASK)
    await talk(stage, mine, 1)
    for repeated in range(2):
        new = await stage.client.open_session(task=TASK, group_id=f"g2-{repeated}", slot=0, epoch=2)
        ended = await outcomes(stage, [mine, done, others, new])
        assert ended == [Outcome.CANCELLED, Outcome.COMPLETED, None, None]
    trajectory = await stage.client.trajectory(mine.session_id)
    assert "epoch 1" in str(trajectory.error)
    assert trajectory.reward is None
    assert (await stage.client.finish(mine.session_id, reward=1.0)).outcome is Outcome.CANCELLED
    with pytest.raises(openai.PermissionDeniedError, match="epoch 1"):
        await talk(stage, mine, 1)
    await talk(stage, others, 1)


async def test_a_call_under_way_is_aborted_when_its_trainer_is_replaced(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK, epoch=1)
    stage.engine.faults.append(Fault("hang"))
    async with client_of(stage, access) as llm:
        asking = asyncio.create_task(llm.chat.completions.create(model="m", messages=ASK))
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        await stage.client.begin_epoch(2)
        with pytest.raises(openai.PermissionDeniedError):
            await asking
    await stage.engine.until(lambda: stage.engine.requests[0]["rid"] in stage.engine.aborted)


async def test_a_trainer_that_was_replaced_opens_no_session(stage: Stage) -> None:
    await stage.client.begin_epoch(2)
    with pytest.raises(GatewayError, match="epoch 1 is over") as raised:
        await stage.client.open_session(task=TASK, epoch=1)
    assert raised.value.status == 410
    with pytest.raises(GatewayError, match="epoch 1 is over"):
        await stage.client.begin_epoch(1)
    assert len(stage.gateway.sessions) == 0


async def test_a_trainer_that_was_replaced_ends_no_session_and_no_group(stage: Stage) -> None:
    """What it asks for too late is refused, and changes nothing of what its successor took over."""
    done = await finished(stage, "g1-1", None)
    open_ = await stage.client.open_session(task=TASK, group_id="g1-2", slot=0)
    await stage.client.begin_epoch(2)
    late = [
        lambda epoch: stage.client.finish(open_.session_id, reward=1.0, epoch=epoch),
        lambda epoch: stage.client.seal_group("g1-1", "t1", [done.session_id], epoch),
        lambda epoch: stage.client.drop_group("g1-1", epoch),
        lambda epoch: stage.client.drop_group("g1-2", epoch),
    ]
    for call in late:
        with pytest.raises(GatewayError, match="epoch 1 is over") as raised:
            await call(1)
        assert raised.value.status == 410
    await talk(stage, open_, 1)
    assert {row.id: row.state for row in await stage.client.list_groups()} == {"g1-1": "live", "g1-2": "live"}
    for call in late:
        await call(2)
    assert await stage.client.list_groups() == []


async def test_where_a_trainer_leads_only_its_own_groups_are_sealed(stage: Stage) -> None:
    own, foreign = await finished(stage, "g1-1", 1), await finished(stage, "theirs", None)
    await stage.client.add_engine(stage.engine.url, admitted=True)
    with pytest.raises(GatewayError, match="group theirs cannot be sealed: a trainer manages") as raised:
        await stage.client.seal_group("theirs", "t1", [foreign.session_id])
    assert raised.value.status == 403
    await stage.client.seal_group("g1-1", "t1", [own.session_id], 1)
    assert [group.id for group in await stage.client.lease(1, 9)] == ["g1-1"]


@pytest.mark.parametrize("what", ["finish", "seal", "drop"])
async def test_a_newer_trainer_arrives_with_whatever_it_asks_for_first(stage: Stage, what: str) -> None:
    done = await finished(stage, "g1-1", 1)
    running = await stage.client.open_session(task=TASK, epoch=1)
    match what:
        case "finish":
            await stage.client.finish(done.session_id, epoch=2)
        case "seal":
            await stage.client.seal_group("g1-1", "t1", [done.session_id], 2)
        case "drop":
            await stage.client.drop_group("g1-1", 2)
    assert await outcomes(stage, [running]) == [Outcome.CANCELLED]


async def test_a_trainer_that_is_replaced_while_it_opens_a_session_gets_one_that_is_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = stage.gateway.journal
    original = journal.opened

    async def opened(session: Any) -> None:
        await original(session)
        await stage.client.begin_epoch(2)

    monkeypatch.setattr(journal, "opened", lambda session: asyncio.ensure_future(opened(session)))
    access = await stage.client.open_session(task=TASK, epoch=1)
    assert await outcomes(stage, [access]) == [Outcome.CANCELLED]


async def test_groups_that_no_trainer_consumed_wait_for_the_next_one(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    """Trainer and gateway die together: what was leased and never acknowledged is leased again."""
    for name in ("g1-1", "g1-2", "g1-3", "g1-4"):
        access = await finished(stage, name, 1)
        if name != "g1-4":
            await stage.client.seal_group(name, "t1", [access.session_id])
    running = await stage.client.open_session(task=TASK, group_id="g1-5", slot=0, epoch=1)
    [trained, held] = await stage.client.lease(1, 2)
    await stage.client.ack(1, trained.lease_id, "trained")
    before = to_wire(replace(held, lease_id=""))
    async with staged(model, journal=killed(tmp_path)) as later:
        assert await outcomes(later, [running]) == [None], "only a newer trainer ends it"
        await later.client.begin_epoch(2)
        assert await outcomes(later, [running]) == [Outcome.CANCELLED]
        rows = {row.id: row.state for row in await later.client.list_groups()}
        assert rows == {"g1-2": "ready", "g1-3": "ready", "g1-4": "live", "g1-5": "live"}
        for call in (later.client.lease(1, 1), later.client.ack(1, held.lease_id, "trained")):
            with pytest.raises(GatewayError, match="epoch 1 is over") as raised:
                await call
            assert raised.value.status == 410
        groups = await later.client.lease(2, 9)
        assert [group.id for group in groups] == ["g1-2", "g1-3"]
        assert to_wire(replace(groups[0], lease_id="")) == before
        with pytest.raises(GatewayError, match="newer trainer"):
            await later.client.ack(2, held.lease_id, "trained")


async def test_a_gateway_that_is_killed_before_it_ended_them_ends_them_when_it_is_back(
    stage: Stage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = await stage.client.open_session(task=TASK, epoch=1)
    monkeypatch.setattr(stage.gateway.groups, "_on_new_epoch", lambda: None)
    await stage.client.begin_epoch(2)
    assert await outcomes(stage, [access]) == [None]
    async with staged(model, journal=killed(tmp_path)) as later:
        await eventually(lambda: later.gateway.session(access.session_id).trajectory is not None)
        assert await outcomes(later, [access]) == [Outcome.CANCELLED]


async def test_a_run_that_is_resumed_begins_with_its_own_engines_and_those_that_joined_wait(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    async with staged(model, journal=killed(tmp_path)) as later:
        assert len(await later.client.list_engines()) == 2
        await later.client.add_engine("http://127.0.0.1:7", admitted=True)  # of the run's last start
        await EngineMembership(later.client, print).open([later.engine.url + "/"])
        rows = {row["url"]: row["admitted"] for row in await later.client.list_engines()}
        assert rows == {later.engine.url: True, stage.engine.url: False}
