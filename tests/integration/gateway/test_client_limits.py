"""What protects a run from a client: call rates, the range of rewards, keys that are not trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, RateLimitError

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.test_clients import call as group_call
from tests.integration.gateway.test_conversations import feedback, say, sessions
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import ConfigError
from tidegate.gateway.clients.protection import CallRates
from tidegate.gateway.errors import ApiError
from tidegate.gateway.project_keys import ProjectKey, create_key, revoke_key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def keys(file: Path) -> dict[str, str]:
    return {
        "free": create_key(file, "free"),
        "slow": create_key(file, "slow", calls_per_minute=2),
        "private": create_key(file, "private", train=False),
    }


@pytest.fixture
async def stage(tmp_path: Path, file: Path, keys: dict[str, str]) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, keys=file, conversation_idle_s=0.2, reward_range=(-1.0, 1.0)) as made:
        yield made


def user(stage: Stage, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0)


def test_a_key_may_make_its_calls_at_once_and_then_one_when_one_is_due() -> None:
    now = [1000.0]
    rates, key = CallRates(lambda: now[0]), ProjectKey("k", "", 0.0, calls_per_minute=6)
    for _ in range(6):
        rates.check(key)
    with pytest.raises(ApiError, match=r"key 'k' may make 6 calls a minute; try again in 10 s") as refused:
        rates.check(key)
    assert refused.value.retryable
    rates.check(ProjectKey("other", "", 0.0, calls_per_minute=1))
    now[0] += 10
    rates.check(key)
    now[0] += 9
    with pytest.raises(ApiError, match="try again in 1 s"):
        rates.check(key)
    now[0] += 3600
    for _ in range(6):
        rates.check(key)
    with pytest.raises(ApiError):
        rates.check(key)


async def test_a_key_above_its_rate_is_refused_and_another_is_not(stage: Stage, keys: dict[str, str]) -> None:
    slow, free = user(stage, keys["slow"]), user(stage, keys["free"])
    async with slow, free:
        for _ in range(2):
            await say(slow, [])
        with pytest.raises(RateLimitError, match="key 'slow' may make 2 calls a minute"):
            await say(slow, [])
        for _ in range(5):
            await say(free, [])
    assert len(sessions(stage)) == 7, "a refused call begins no conversation"


async def test_calls_in_a_clients_group_count_as_well(stage: Stage, keys: dict[str, str]) -> None:
    async with aiohttp.ClientSession() as http:
        row: Any = await group_call(http, stage, "POST", "g/episodes", keys["slow"], {"task_id": "t"})
    async with AsyncOpenAI(base_url=row["base_url"], api_key=row["api_key"], max_retries=0) as agent:
        for _ in range(2):
            await say(agent, [])
        with pytest.raises(RateLimitError):
            await say(agent, [])


async def test_a_reward_outside_the_range_is_refused_and_changes_nothing(
    stage: Stage, keys: dict[str, str]
) -> None:
    async with user(stage, keys["free"]) as client:
        reply = await say(client, [])
        for value in (1.5, -2, 1e9):
            status, message = await feedback(stage, keys["free"], reply.id, value)
            assert (status, "is outside gateway.reward_range = [-1, 1]" in message) == (400, True), message
        assert sessions(stage)[0].rewards == {}
        await feedback(stage, keys["free"], reply.id, 0.75, name="a")
        for more in ({"name": "b"}, {"name": "a", "reply_only": True}):
            status, message = await feedback(stage, keys["free"], reply.id, 0.75, **more)
            assert (status, message.startswith("the reward 1.5 is outside")) == (400, True), "the sum"
        await feedback(stage, keys["free"], reply.id, 0, name="a")
        assert "group" in await feedback(stage, keys["free"], reply.id, -1)
        [group] = await stage.client.lease(1, 1, wait_s=10)
        assert group.trajectories[0].reward == -1.0


async def test_what_a_key_calls_that_is_not_trained_on_is_exempt(stage: Stage, keys: dict[str, str]) -> None:
    async with user(stage, keys["private"]) as client:
        reply = await say(client, [], extra_headers={"x-tidegate-train": "yes"})
        [session] = sessions(stage)
        assert session.tree.nodes[0].turn.exempt == "key 'private', which is not trained on"
        await feedback(stage, keys["private"], reply.id, "up")
        await eventually(lambda: session.trajectory is not None)
        assert session.trajectory is not None
        assert not session.trajectory.outcome.trainable
    assert await stage.client.lease(1, 1) == []


async def test_what_is_called_after_a_key_was_revoked_is_not_trained_on(
    stage: Stage, keys: dict[str, str], file: Path
) -> None:
    async with aiohttp.ClientSession() as http:
        row: Any = await group_call(http, stage, "POST", "g/episodes", keys["private"], {"task_id": "t"})
    revoke_key(file, "private")
    stage.gateway.keys.reload()
    async with AsyncOpenAI(base_url=row["base_url"], api_key=row["api_key"], max_retries=0) as agent:
        await say(agent, [])
    [session] = sessions(stage)
    assert session.tree.nodes[0].turn.exempt == "key 'private', which is not valid any more"


@pytest.mark.parametrize("number", [0, -3])
def test_a_rate_below_one_is_refused(file: Path, number: int) -> None:
    with pytest.raises(ConfigError, match=f"calls_per_minute = {number}"):
        create_key(file, "me", calls_per_minute=number)


def test_keys_of_an_earlier_version_are_read(file: Path) -> None:
    file.write_text('{"keys": [{"name": "old", "hash": "00", "created": 1.0}]}')
    from tidegate.gateway.project_keys import read_keys

    old: Any = read_keys(file)["old"]
    assert (old.calls_per_minute, old.train) == (None, True)
