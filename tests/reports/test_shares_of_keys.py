"""What one client's deletions, calls and rewards did to the other clients of a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.fakes import Fault, Stage, eventually, staged
from tests.integration.gateway.test_clients import call as group_call
from tests.integration.gateway.test_conversations import feedback, say, sessions
from tests.tiny_tokenizer import make_model_dir
from tests.unit.trainer.batch.test_credit import credit, episode, group
from tidegate.gateway.clients.conversations import Conversations
from tidegate.gateway.project_keys import create_key
from tidegate.trainer.batch.credit import faulty_reward


@pytest.fixture
def key(tmp_path: Path) -> str:
    return create_key(tmp_path / "keys.json", "me")


@pytest.fixture
async def stage(tmp_path: Path, key: str) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, keys=tmp_path / "keys.json", conversation_idle_s=600.0) as made:
        yield made


@pytest.fixture
async def user(stage: Stage, key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as made:
        yield made


async def test_the_deletion_of_what_never_existed_is_no_success(stage: Stage, key: str) -> None:
    """langfuse/langfuse#8139: deleting a trace that does not exist answers with success."""
    async with aiohttp.ClientSession() as http:
        assert (await group_call(http, stage, "DELETE", "no", key))[0] == 404  # type: ignore[index]


async def test_a_deleted_conversation_is_not_tried_for_ever_nor_kept_in_any_index(
    stage: Stage, user: AsyncOpenAI, key: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """saltbo/agent-kanban#82, rmyndharis/OpenWA#505: what was deleted is resumed for ever, or is kept."""
    made: list[Conversations] = []
    update = Conversations._update
    monkeypatch.setattr(Conversations, "_update", lambda self: (made.append(self), update(self)))
    reply = await say(user, [], extra_headers={"x-tidegate-session": "a"})
    name = (await feedback(stage, key, reply.id, "up"))["group"]
    async with aiohttp.ClientSession() as http:
        assert await group_call(http, stage, "DELETE", name, key) == {}
    one = made[0]
    held = (*vars(one._index).values(), one._calling)
    assert len(held) == 6
    await eventually(lambda: not any(held))
    assert sessions(stage) == []
    assert "could not be ended" not in caplog.text


async def test_a_client_that_leaves_during_a_deletion_leaves_nothing_half_deleted(
    stage: Stage, user: AsyncOpenAI, key: str
) -> None:
    """agent-of-empires/agent-of-empires#2127: a closed tab left a session deleted on disk, not in memory."""
    reply = await say(user, [])
    name = (await feedback(stage, key, reply.id, "up"))["group"]
    host, port = stage.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"DELETE /v1/conversations/{name} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()
    writer.transport.abort()
    again = await say(user, [])
    await eventually(lambda: reply.id not in str([one.tree.nodes for one in sessions(stage)]))
    assert (await feedback(stage, key, again.id, "up"))["group"] != name


async def test_calls_of_a_killed_client_leave_the_queue(stage: Stage, user: AsyncOpenAI) -> None:
    """vllm-project/vllm#10806, #2901: requests of clients that were killed keep their places."""
    stage.engine.faults.append(Fault("hold"))
    [engine] = stage.gateway.pool.engines()
    engine.limit = 1
    calls = [asyncio.create_task(say(user, [], f"{number}")) for number in range(4)]
    await eventually(lambda: stage.gateway.pool.waiting == 3)
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await eventually(lambda: stage.gateway.pool.waiting == 0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e308])
def test_one_reward_leaves_the_other_groups_of_a_batch_as_they_are(reward: float) -> None:
    """modelscope/ms-swift#8123, METR/vivaria#888: one NaN or infinite score makes every advantage NaN."""
    fine, faulty = group(episode(0), episode(1)), group(episode(0), episode(reward))
    assert faulty_reward(faulty) is not None
    assert faulty_reward(fine) is None
    assert credit().should_train(fine)
