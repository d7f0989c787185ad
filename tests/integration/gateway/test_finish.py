"""The end of a session: rewards and outcomes."""

from __future__ import annotations

import asyncio
import math
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.control_stage import ASK, TASK, Sums, ask, rewarder, stage
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import GatewayError
from tidegate.gateway import gateway as gateway_module
from tidegate.types import Outcome, Task

__all__ = ["rewarder", "stage"]


async def test_the_environments_reward_at_finish(stage: Stage, rewarder: Sums) -> None:
    access = await stage.client.open_session(task=TASK, slot=3, group_id="g", metadata={"attempt": "a"})
    stage.say("It is 3.")
    await ask(access)
    summary = await stage.client.finish(access.session_id, output="3", reward=0.25, metrics={"tries": 2})
    assert (summary.reward, summary.reward_parts, summary.agent_reward) == (1.0, {"exact": 1.0}, 0.25)
    [(task, _, output, messages)] = rewarder.seen
    assert (task, output) == (TASK, "3")
    assert messages == [*ASK, {"role": "assistant", "content": "It is 3."}]
    trajectory = await stage.client.trajectory(access.session_id)
    assert (trajectory.slot, trajectory.group_id, trajectory.task_id) == (3, "g", "t1")
    assert trajectory.metadata == {"attempt": "a"}
    assert trajectory.metrics == {"tries": 2.0}


async def test_a_task_that_is_no_json_is_refused_by_name(stage: Stage) -> None:
    with pytest.raises(GatewayError, match=r"POST /sessions: .* encoded as JSON: Object of type set"):
        await stage.client.open_session(task=Task("t", "env", [], info={"seen": {1}}))


async def test_a_hanging_reward_ends_as_reward_error_and_finish_stays_idempotent(
    stage: Stage, rewarder: Sums
) -> None:
    rewarder.hang = threading.Event()
    access = await stage.client.open_session(task=TASK)
    await ask(access)
    first, second = await asyncio.gather(
        *(stage.client.finish(access.session_id, output="3") for _ in range(2))
    )
    rewarder.hang.set()
    assert first == second
    assert (first.outcome, first.reward) == (Outcome.REWARD_ERROR, None)
    assert len(rewarder.seen) == 1


async def test_a_reward_may_take_longer_than_its_session_and_than_a_call(
    tmp_path: Path, rewarder: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finishes a session asks again while it is rewarded, and nobody forgets it meanwhile."""
    monkeypatch.setattr(gateway_module, "SWEEP_S", 0.02)
    rewarder.hang = threading.Event()
    async with staged(make_model_dir(tmp_path / "tiny"), rewarders={"sums": rewarder}, grace_s=0.1) as stage:
        access = await stage.client.open_session(task=TASK, deadline_s=3.0)
        await ask(access)
        finish = partial(stage.client.finish, access.session_id, output="3", timeout_s=1.0)
        finishing = asyncio.create_task(finish())
        session = stage.gateway.session(access.session_id)
        loop = asyncio.get_running_loop()
        await eventually(lambda: loop.time() > session.deadline + 1.0)
        rewarder.hang.set()
        summary = await finishing
        assert (summary.reward, await finish()) == (1.0, summary)
        assert len(rewarder.seen) == 1


async def test_a_reward_that_is_not_a_number_crosses_the_wire_as_such(stage: Stage) -> None:
    access = await stage.client.open_session(task=Task("t", "other", []))
    await ask(access)
    summary = await stage.client.finish(access.session_id, reward=math.nan)
    assert (summary.outcome, summary.reward) == (Outcome.REWARD_ERROR, None)
    assert "nan" in str(summary.error)


async def test_rewards_posted_while_it_runs(stage: Stage) -> None:
    access = await stage.client.open_session(task=Task("t", "other", []))
    await ask(access)
    await stage.client.post_reward(access.session_id, 0.5)
    summary = await stage.client.finish(access.session_id)
    assert (summary.reward, summary.reward_parts) == (0.5, {"reward": 0.5})
    with pytest.raises(GatewayError, match="is over"):
        await stage.client.post_reward(access.session_id, 1.0)


async def test_rewards_posted_for_single_turns(stage: Stage) -> None:
    access = await stage.client.open_session(task=Task("t", "other", []))
    await ask(access)
    await stage.client.post_reward(access.session_id, 0.5, turn=0)
    await stage.client.post_reward(access.session_id, 0.25, name="form", turn=0)
    with pytest.raises(GatewayError, match="has no turn 1; it has 1"):
        await stage.client.post_reward(access.session_id, 1.0, turn=1)
    summary = await stage.client.finish(access.session_id)
    assert (summary.reward, summary.reward_parts) == (0.0, {})
    trajectory = await stage.client.trajectory(access.session_id)
    assert [turn.reward for turn in trajectory.turns] == [0.75]


@pytest.mark.parametrize("outcome", ["agent_error", "timeout", "cancelled", "infra_error"])
async def test_the_failure_that_the_caller_reports_is_kept(stage: Stage, outcome: str) -> None:
    access = await stage.client.open_session(task=TASK)
    await ask(access)
    summary = await stage.client.finish(access.session_id, output="3", outcome=outcome, error="why")
    assert (summary.outcome.value, summary.reward, summary.error) == (outcome, None, "why")


async def test_an_agent_that_never_called(stage: Stage) -> None:
    access = await stage.client.open_session(task=TASK)
    summary = await stage.client.finish(access.session_id, output="3")
    assert (summary.outcome, summary.reward) == (Outcome.AGENT_ERROR, None)
    assert "base_url" in str(summary.error)
