"""Groups: sealed, leased, acknowledged, dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.control_stage import TASK, Sums, ask, episode, rewarder, stage
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import GatewayError
from tidegate.gateway import gateway as gateway_module
from tidegate.types import Outcome

__all__ = ["rewarder", "stage"]


async def test_groups_from_sealing_to_acknowledgement(stage: Stage) -> None:
    stage.engine.version = "7"
    live = await stage.client.open_session(task=TASK, group_id="a/1", slot=0)
    sessions = [await episode(stage, output, group_id="a/2", slot=s) for s, output in ((1, "3"), (0, "4"))]
    failed = await stage.client.open_session(task=TASK, group_id="a/2", slot=1)
    rows = {row.id: row for row in await stage.client.list_groups()}
    assert (rows["a/1"].state, rows["a/1"].oldest_version) == ("live", None)
    assert (rows["a/2"].state, rows["a/2"].oldest_version) == ("live", 7)
    waiting = asyncio.create_task(stage.client.lease(1, 4, 20.0))
    for _ in range(2):
        await stage.client.seal_group("a/2", "t1", sessions)
    [group] = await waiting
    assert (group.id, group.task_id, group.rewards()) == ("a/2", "t1", [0.0, 1.0])
    assert group.oldest_version() == 7
    assert {row.id: row.state for row in await stage.client.list_groups()} == {"a/1": "live", "a/2": "leased"}
    for _ in range(2):
        await stage.client.ack(1, group.lease_id, "trained")
    assert [row.id for row in await stage.client.list_groups()] == ["a/1"]
    assert {session.id for session in stage.gateway.sessions.all()} == {live.session_id}
    with pytest.raises(GatewayError) as raised:
        await stage.client.finish(failed.session_id)
    assert raised.value.status == 404
    with pytest.raises(GatewayError, match="accepts no more sessions") as raised:
        await stage.client.open_session(task=TASK, group_id="a/2")
    assert raised.value.status == 410


async def test_a_restarted_trainer_gets_the_leases_of_the_killed_one(stage: Stage) -> None:
    await stage.client.seal_group("a", "t1", [await episode(stage, group_id="a", slot=0)])
    [old] = await stage.client.lease(1, 1)
    [new] = await stage.client.lease(2, 1)
    assert (old.id, old.lease_id != new.lease_id) == (new.id, True)
    for call in (stage.client.lease(1, 1), stage.client.ack(1, old.lease_id, "trained")):
        with pytest.raises(GatewayError) as raised:
            await call
        assert raised.value.status == 410
    await stage.client.ack(2, new.lease_id, "trained")


async def test_a_lease_whose_asker_left_is_free_for_the_next(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.client.lease(1, 1, 20.0))
    await eventually(lambda: stage.gateway.groups.epoch)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stage.client.seal_group("a", "t1", [await episode(stage, group_id="a", slot=0)])
    [group] = await stage.client.lease(1, 1, 5.0)
    assert group.id == "a"


async def test_text_that_no_encoding_has_cannot_block_a_lease(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK, group_id="a", slot=0)
    await ask(access)
    await stage.client.finish(access.session_id, output="a\ud800b", error="\udfff", metrics={"\ud800": 1})
    await stage.client.seal_group("a", "t1", [access.session_id])
    [group] = await stage.client.lease(1, 1)
    assert group.trajectories[0].output == "a?b"
    for body in ({"metadata": {"a": "\ud800"}}, {"env": "\ud800"}):
        with pytest.raises(GatewayError, match="cannot be stored") as raised:
            await stage.client._json("POST", "/sessions", body)
        assert raised.value.status == 400


@pytest.mark.parametrize("wrong", ["unfinished", "stranger", "failed", "unknown", "none"])
async def test_only_finished_rewarded_members_are_sealed(stage: Stage, wrong: str) -> None:
    good = await episode(stage, group_id="a", slot=0)
    if wrong == "unfinished":
        bad = (await stage.client.open_session(task=TASK, group_id="a")).session_id
    elif wrong == "stranger":
        bad = await episode(stage, group_id="b")
    elif wrong == "failed":
        bad = (await stage.client.open_session(task=TASK, group_id="a")).session_id
        await stage.client.finish(bad, outcome="agent_error")
    else:
        bad = "nonsense"
    with pytest.raises(GatewayError) as raised:
        await stage.client.seal_group("a", "t1", [] if wrong == "none" else [good, bad])
    assert raised.value.status in (400, 404)
    assert await stage.client.lease(1, 1) == []


async def test_a_dropped_group_is_gone_for_good(stage: Stage) -> None:
    done = await episode(stage, group_id="a", slot=0)
    live = await stage.client.open_session(task=TASK, group_id="a", slot=1)
    sampled = len((await stage.client.trajectory(done)).turns[0].output_ids)
    recorded = sorted(await stage.client.drop_group("a"), key=lambda one: one.slot or 0)
    assert [(one.session_id, one.outcome) for one in recorded] == [
        (done, Outcome.COMPLETED), (live.session_id, Outcome.CANCELLED),
    ]  # fmt: skip
    assert [one.sampled_tokens() for one in recorded] == [sampled, 0]
    assert await stage.client.drop_group("a") == []
    for session in (done, live.session_id):
        with pytest.raises(GatewayError) as raised:
            await stage.client.finish(session)
        assert raised.value.status == 404
    with pytest.raises(openai.AuthenticationError):
        await ask(live)
    with pytest.raises(GatewayError) as raised:
        await stage.client.seal_group("a", "t1", [done])
    assert raised.value.status == 410
    assert await stage.client.list_groups() == []


async def test_orphans_expire_and_sealed_groups_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewarder: Sums
) -> None:
    monkeypatch.setattr(gateway_module, "SWEEP_S", 0.02)
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, rewarders={"sums": rewarder}, grace_s=0.1, retention_s=0.1) as stage:
        sealed = await episode(stage, group_id="a")
        await stage.client.seal_group("a", "t1", [sealed])
        orphan = await stage.client.open_session(task=TASK, deadline_s=0.1)
        kept = await stage.client.open_session(task=TASK, deadline_s=60.0)
        await episode(stage)
        await eventually(lambda: len(stage.gateway.sessions) == 2)
        assert (await stage.client.trajectory(sealed)).reward == 1.0
        with pytest.raises(openai.AuthenticationError):
            await ask(orphan)
        assert await ask(kept)
        assert len(await stage.client.lease(1, 1)) == 1
