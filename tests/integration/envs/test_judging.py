"""Judges in a real environment service, and in a gateway that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Stage, staged
from tests.integration.gateway.control_stage import ask
from tests.scripted_judge import Endpoint, graded, judging
from tests.tiny_tokenizer import make_model_dir
from tests.waiting import eventually
from tidegate.errors import ConfigError, GatewayError, RewardError, RewardUnavailableError, StartError
from tidegate.gateway.environments.client import OwnedEnvironments
from tidegate.gateway.errors import UNRANKED
from tidegate.gateway.groups import rewards
from tidegate.settings.judge import JudgeSettings
from tidegate.types import CONVERSATION, Outcome, Task, Trajectory

FILE = Path(__file__).with_name("judged.py")
MESSAGES = [{"role": "user", "content": "Say a number."}]


@contextlib.asynccontextmanager
async def service(use: str, cache: Path | None = None, **judge: Any) -> AsyncIterator[OwnedEnvironments]:
    settings = JudgeSettings.model_validate(judge).model_dump(mode="json")
    secrets = {"options": {}, "judge": settings, "judge_cache": None if cache is None else str(cache)}
    named = [f"--env.use={FILE}:{use}"] if use else ["--env.use="]
    environments = OwnedEnvironments(named, secrets)
    try:
        await environments.start()
        yield environments
    finally:
        await environments.close()


def task(env: str) -> Task:
    return Task("t", env, MESSAGES)


def ended(output: str, env: str, **fields: Any) -> Trajectory:
    return Trajectory("s", "t", env, "train", Outcome.COMPLETED, [], output=output, **fields)


async def test_a_judge_is_added_to_the_rewards_of_any_environment() -> None:
    async with judging() as endpoint, service("Verified", **endpoint.settings()) as env:
        info = env.info("verified")
        assert info is not None
        assert (info.rewards, info.ranked) == (["short", "judge"], False)
        scored = await env.score("e", task("verified"), ended("0.25", "verified"))
        assert (scored.reward, scored.parts) == (1.25, {"short": 1.0, "judge": 0.25})
        with pytest.raises(RewardError, match="no verifier"):
            await env.score("e", task("verified"), ended("broken", "verified"))
        assert len(endpoint.requests) == 1, "an episode without its own reward is not judged"


async def test_without_rewards_the_judge_is_alone_or_beside_the_agents_own() -> None:
    async with judging() as endpoint, service("Plain", **endpoint.settings(weight=2.0)) as env:
        info = env.info("plain")
        assert info is not None
        assert info.rewards == ["judge"]
        assert (await env.score("e", task("plain"), ended("0.25", "plain"))).reward == 0.5
        own = ended("0.25", "plain", agent_reward=1.0)
        scored = await env.score("e", task("plain"), own)
        assert (scored.reward, scored.metrics["judge/environment"]) == (1.5, 1.0)


async def test_conversations_are_judged_beside_their_feedback() -> None:
    async with judging() as endpoint, service("", **endpoint.settings()) as env:
        alone = ended("0.25", CONVERSATION)
        assert (await env.score("e", task(CONVERSATION), alone)).reward == 0.25
        thumbs = ended("0.5", CONVERSATION, reward_parts={"thumbs": 1.0})
        assert (await env.score("f", task(CONVERSATION), thumbs)).reward == 1.5


async def test_a_judge_that_fails_is_an_error_with_its_costs() -> None:
    async with judging() as endpoint, service("Plain", **endpoint.settings(attempts=2)) as env:
        endpoint.reply = lambda _: "no idea"
        with pytest.raises(RewardError, match="gave no verdict in 2 of at most 2 calls") as raised:
            await env.score("e", task("plain"), ended("x", "plain"))
        assert raised.value.metrics["judge/errors"] == 2.0
        endpoint.reply = lambda _: (503, "overloaded")
        with pytest.raises(RewardUnavailableError, match="503") as unavailable:
            await env.score("f", task("plain"), ended("y", "plain"))
        assert unavailable.value.metrics["judge/errors"] == 2.0


async def test_a_name_of_the_judges_is_refused_in_an_environment(capfd: pytest.CaptureFixture[str]) -> None:
    async with judging() as endpoint:
        with pytest.raises(StartError, match="did not start"):
            async with service("Clashing", **endpoint.settings()):
                pass
    assert "the environment 'plain' has a reward named 'judge'" in capfd.readouterr().err


def test_a_missing_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = JudgeSettings.model_validate(
        {"url": "http://j", "model": "m", "rubric": "r", "api_key_env": "NO_SUCH_KEY"}
    )
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        settings.resolved()


# -- groups ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ranking(
    tmp_path: Path, use: str = "Verified", **judge: Any
) -> AsyncIterator[tuple[Stage, Endpoint]]:
    model = make_model_dir(tmp_path / "tiny")
    async with judging() as endpoint:
        settings = endpoint.settings(kind="ranking", **judge)
        async with (
            service(use, tmp_path / "judge.sqlite", **settings) as env,
            staged(model, environments=env, journal=tmp_path / "journal") as stage,
        ):
            yield stage, endpoint


async def episode(stage: Stage, output: str, slot: int, env: str = "verified", group: str = "g") -> str:
    access = await stage.client.open_session(task=task(env), deadline_s=60.0, group_id=group, slot=slot)
    await ask(access)
    await stage.client.finish(access.session_id, output=output)
    return access.session_id


async def test_a_group_is_ready_when_it_is_ranked(tmp_path: Path) -> None:
    async with ranking(tmp_path) as (stage, endpoint):
        sessions = [await episode(stage, output, slot) for slot, output in enumerate(("0.2", "too long 0.9"))]
        endpoint.hold = asyncio.Event()
        sealing = asyncio.create_task(stage.client.seal_group("g", "t", sessions))
        await eventually(lambda: endpoint.running == 1)
        assert await stage.client.lease(1, 1, 0.0) == [], "its rewards are not final"
        endpoint.hold.set()
        assert await sealing is None
        assert await stage.client.seal_group("g", "t", sessions) is None, "a repeated call changes nothing"
        [group] = await stage.client.lease(1, 1, 0.0)
        assert group.rewards() == [pytest.approx(1.2), pytest.approx(0.9)]
        assert group.trajectories[0].reward_parts == {"short": 1.0, "judge": 0.2}
        assert len(endpoint.requests) == 1


async def test_a_group_without_a_ranking_ends_as_reward_error(tmp_path: Path) -> None:
    async with ranking(tmp_path, attempts=1) as (stage, endpoint):
        endpoint.reply = lambda _: (400, "no such model")
        sessions = [await episode(stage, f"0.{slot}", slot) for slot in range(2)]
        for _ in range(2):
            why = await stage.client.seal_group("g", "t", sessions)
            assert why is not None
            assert "status 400: no such model" in why
        assert len(endpoint.requests) == 1, "its retry limit is the judge's"
        with pytest.raises(GatewayError, match="could not be ranked") as raised:
            await stage.gateway.seal("g", "t", sessions)
        assert raised.value.status == UNRANKED
        dropped = await stage.client.drop_group("g")
        assert [(one.outcome, one.reward) for one in dropped] == [(Outcome.REWARD_ERROR, None)] * 2
        assert dropped[0].metrics["judge/errors"] == 1.0
        assert "judge/errors" not in dropped[1].metrics
        endpoint.reply = graded
        again = [await episode(stage, f"0.{slot}", slot, group="h") for slot in range(2)]
        assert await stage.client.seal_group("h", "t", again) is None


async def test_a_group_waits_while_its_judge_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rewards, "FIRST_S", 0.01)
    async with ranking(tmp_path, attempts=1) as (stage, endpoint):
        endpoint.reply = lambda _: (503, "overloaded")
        sessions = [await episode(stage, "0.2", 0)]
        sealing = asyncio.create_task(stage.client.seal_group("g", "t", sessions))
        await eventually(lambda: len(endpoint.requests) > 2)
        endpoint.reply = graded
        assert await asyncio.wait_for(sealing, 20.0) is None
        [group] = await stage.client.lease(1, 1, 0.0)
        assert group.rewards() == [pytest.approx(1.2)]
        assert "the ranking of group g: " in caplog.text

        monkeypatch.setattr(rewards, "OUTAGE_S", 0.0)
        endpoint.reply = lambda _: (503, "overloaded")
        late = [await episode(stage, "0.3", 0, group="late")]
        assert "status 503: overloaded" in str(await stage.client.seal_group("late", "t", late))


async def test_a_dropped_group_waits_for_no_ranking(tmp_path: Path) -> None:
    async with ranking(tmp_path) as (stage, endpoint):
        endpoint.hold = asyncio.Event()
        sessions = [await episode(stage, "0.2", 0)]
        sealing = asyncio.create_task(stage.client.seal_group("g", "t", sessions))
        await eventually(lambda: endpoint.running == 1)
        await stage.client.drop_group("g")
        with pytest.raises(GatewayError) as raised:
            await asyncio.wait_for(sealing, 15.0)  # the judge still holds its reply
        assert raised.value.status in (404, 410)
        endpoint.hold.set()


async def test_a_crash_leaves_either_none_or_all_of_the_ranked_rewards(tmp_path: Path) -> None:
    async with ranking(tmp_path) as (stage, _):
        sessions = [await episode(stage, f"0.{slot}", slot) for slot in (2, 4)]
        before = stage.gateway.journal.load()
        assert [one.trajectory.reward for one in before.sessions if one.trajectory] == [1.0, 1.0]
        await stage.client.seal_group("g", "t", sessions)
        after = stage.gateway.journal.load()
        [entry] = after.entries
        assert (await entry.group()).rewards() == [pytest.approx(1.2), pytest.approx(1.4)]
        assert [one.trajectory.reward_parts["judge"] for one in after.sessions if one.trajectory] == [
            0.2,
            0.4,
        ]


async def test_a_group_without_other_rewards_has_those_of_the_ranking(tmp_path: Path) -> None:
    async with ranking(tmp_path, "Plain", environment_weight=0) as (stage, endpoint):
        sessions = [await episode(stage, f"0.{slot}", slot, "plain") for slot in range(3)]
        await stage.client.seal_group("g", "t", sessions)
        [group] = await stage.client.lease(1, 1, 0.0)
        assert group.rewards() == [0.0, 0.1, 0.2]
        [request] = endpoint.requests
        assert json.dumps(request).count("<attempt-") == 3
