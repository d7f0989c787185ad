"""What one project key can take from the others: conversations, groups, places in the queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, RateLimitError

from tests.fakes import Fault, Stage, eventually, staged
from tests.integration.gateway.test_clients import call as group_call
from tests.integration.gateway.test_conversations import feedback, say, sessions
from tests.integration.gateway.test_journal import killed
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import GatewayError
from tidegate.gateway.clients import conversations, groups
from tidegate.gateway.engines.engine import PoolOptions
from tidegate.gateway.errors import ApiError
from tidegate.gateway.project_keys import create_key
from tidegate.gateway.turns import request_reader
from tidegate.gateway.turns.redaction import redact_body

EPISODE = {"task_id": "t"}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {name: create_key(tmp_path / "keys.json", name) for name in ("hostile", "honest")}


@pytest.fixture
async def stage(tmp_path: Path, keys: dict[str, str]) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    pool = PoolOptions(waiting_calls=4, engine_calls=2)
    options: dict[str, Any] = {"keys": tmp_path / "keys.json", "conversation_idle_s": 0.2, "pool": pool}
    async with staged(model, journal=tmp_path / "journal", max_client_groups=2, **options) as made:
        yield made


@pytest.fixture
async def users(stage: Stage, keys: dict[str, str]) -> AsyncIterator[dict[str, AsyncOpenAI]]:
    made = {
        name: AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0)
        for name, key in keys.items()
    }
    yield made
    for user in made.values():
        await user.close()


@pytest.mark.parametrize("ended_by", ["its client", "the trainer", "the administrator"])
async def test_a_conversation_whose_session_is_gone_has_ended(
    stage: Stage,
    users: dict[str, AsyncOpenAI],
    keys: dict[str, str],
    ended_by: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 1)
    monkeypatch.setattr(conversations, "SWEEP_S", 0.01)
    reply = await say(users["hostile"], [])
    group = (await feedback(stage, keys["hostile"], reply.id, "up"))["group"]
    if ended_by == "its client":
        async with aiohttp.ClientSession() as http:
            assert await group_call(http, stage, "DELETE", group, keys["hostile"]) == {}
    elif ended_by == "the trainer":
        await stage.client.drop_group(f"hostile.{group}", 1)
    else:
        await stage.client.delete_session(sessions(stage)[0].id)
    assert (await feedback(stage, keys["hostile"], reply.id, "up"))[0] == 404
    again = await say(users["hostile"], [])  # there is room
    assert sessions(stage)[0].tree.nodes[0].request.id in again.id
    assert "could not be ended" not in caplog.text


async def test_an_end_that_fails_is_tried_less_and_less_often_and_logged_once_for_all(
    stage: Stage,
    users: dict[str, AsyncOpenAI],
    keys: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[str] = []

    async def refused(session_id: str, *_: object, **__: object) -> None:
        tries.append(session_id)
        raise GatewayError("the disk is full", status=503)

    monkeypatch.setattr(conversations, "SWEEP_S", 0.01)
    monkeypatch.setattr(conversations, "backoff_s", lambda failures, *_: 0.0 if failures < 3 else 1e6)
    monkeypatch.setattr(stage.gateway, "finish", refused)
    for _ in range(5):
        reply = await say(users["hostile"], [])
        await feedback(stage, keys["hostile"], reply.id, "up")
    with caplog.at_level(logging.ERROR):
        await eventually(lambda: len(tries) == 20)
    assert all(tries.count(one.id) == 4 for one in sessions(stage))
    lines = [line for line in caplog.messages if "could not be ended yet" in line]
    assert len(lines) < 20
    assert lines[0].endswith("the disk is full")


async def test_a_key_cannot_take_all_conversations(
    users: dict[str, AsyncOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 4)
    for _ in range(4):
        await say(users["hostile"], [])
    with pytest.raises(RateLimitError, match="4 conversations have not ended, 4 of them of this key"):
        await say(users["hostile"], [])
    for _ in range(2):  # its equal share
        await say(users["honest"], [])
    with pytest.raises(RateLimitError):
        await say(users["honest"], [])


async def test_a_key_cannot_take_all_groups_nor_all_episodes(
    stage: Stage, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MAX_EPISODES", 3)
    async with aiohttp.ClientSession() as http:

        async def opened(key: str, group: str) -> Any:
            row = await group_call(http, stage, "POST", f"{group}/episodes", keys[key], EPISODE)
            return row if isinstance(row, tuple) else 200

        assert [await opened("hostile", name) for name in ("a", "b")] == [200, 200]
        status, why = await opened("hostile", "c")
        assert (status, "2 groups of clients have not ended, 2 of them of this key" in why) == (429, True)
        assert await opened("honest", "a") == 200
        assert (await opened("honest", "b"))[0] == 429
        assert [await opened("hostile", "a") for _ in range(2)] == [200, 200]
        assert await opened("hostile", "a") == (409, "group 'a' has 3 episodes, which is the limit")


async def test_a_conversation_takes_no_episodes(
    stage: Stage, users: dict[str, AsyncOpenAI], keys: dict[str, str]
) -> None:
    await say(users["hostile"], [])
    name = (sessions(stage)[0].group_id or "").rpartition(".")[2]
    async with aiohttp.ClientSession() as http:
        refusal = await group_call(http, stage, "POST", f"{name}/episodes", keys["hostile"], EPISODE)
    assert refusal == (409, f"group '{name}' is a conversation, which has no episodes")


async def test_a_key_that_fills_the_queue_keeps_nobody_out(
    stage: Stage, users: dict[str, AsyncOpenAI]
) -> None:
    engine = stage.engine
    engine.faults.extend([Fault("hold")] * 1000)
    flood = [asyncio.create_task(say(users["hostile"], [])) for _ in range(10)]
    await eventually(lambda: sum(one.done() for one in flood) == 4)  # refused: the queue has four places
    mine = asyncio.create_task(say(users["honest"], []))
    await eventually(lambda: stage.gateway.pool.waiting == 5)
    engine.faults.clear()
    engine.release()
    assert (await mine).choices
    done = await asyncio.gather(*flood, return_exceptions=True)
    assert sum(isinstance(one, Exception) for one in done) == 4


async def test_rewards_of_keys_are_bounded_without_any_setting(
    stage: Stage, users: dict[str, AsyncOpenAI], keys: dict[str, str]
) -> None:
    reply = await say(users["hostile"], [])
    for value in (1e308, -1e200, 1001):
        status, why = await feedback(stage, keys["hostile"], reply.id, value)
        assert (status, "is outside gateway.reward_range = [-1000, 1000]" in why) == (400, True), why
    await feedback(stage, keys["hostile"], reply.id, 900)
    for more in ({"name": "b"}, {"name": "b", "reply_only": True}):
        assert (await feedback(stage, keys["hostile"], reply.id, 900, **more))[0] == 400, "the sum"
    async with aiohttp.ClientSession() as http:
        row: Any = await group_call(http, stage, "POST", "g/episodes", keys["hostile"], EPISODE)
        for value in (1e308, -1e200):
            headers = {"Authorization": f"Bearer {row['finish_key']}"}
            url = f"{stage.url}/s/{row['episode']}/finish"
            async with http.post(url, json={"reward": value}, headers=headers) as response:
                assert response.status == 400
                assert "is outside gateway.reward_range" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("path", ["v1/feedback", "v1/groups/g/episodes", "v1/groups/g/seal"])
async def test_routes_without_texts_of_a_model_take_no_large_body(
    stage: Stage, keys: dict[str, str], path: str
) -> None:
    body = json.dumps({"id": "x" * request_reader.SMALL_BODY}).encode()
    headers = {"Authorization": f"Bearer {keys['hostile']}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{stage.url}/{path}", data=body) as response,
    ):
        assert response.status == 413
        assert "the body is larger than 1048576 bytes" in await response.text()


async def test_a_key_whose_bodies_are_large_is_refused_and_another_is_not(
    stage: Stage, keys: dict[str, str], users: dict[str, AsyncOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "HELD_BODIES", 10**6)
    gone = asyncio.Event()

    async def unfinished() -> AsyncIterator[bytes]:
        yield b"[" + b" " * 900_000
        await gone.wait()

    async def send(key: str) -> None:
        headers = {"Authorization": f"Bearer {keys[key]}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            with contextlib.suppress(aiohttp.ClientError):
                await http.post(f"{stage.url}/v1/chat/completions", data=unfinished())

    held = stage.gateway.bodies._held
    sending = asyncio.create_task(send("hostile"))
    await eventually(lambda: held["key hostile"] > 900_000)
    long = "word " * 60_000
    with pytest.raises(RateLimitError, match="bodies of 900001 bytes are being read for this key"):
        await say(users["hostile"], [], long)
    with pytest.raises(BadRequestError, match="the prompt alone has at least"):
        await say(users["honest"], [], long)
    gone.set()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await eventually(lambda: not held["key hostile"])


async def test_a_body_of_too_many_values_is_refused_before_it_is_redacted() -> None:
    body = b'{"messages": [' + b"[]," * request_reader.MAX_VALUES + b"1]}"
    with pytest.raises(ApiError, match="more than 1000000 values") as refused:
        redact_body(body, str)
    assert refused.value.status == 413


async def test_conversations_without_feedback_are_kept_up_to_a_number_for_each_key(
    tmp_path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_UNREWARDED", 2)
    monkeypatch.setattr(conversations, "SWEEP_S", 0.01)
    files = {"keys": tmp_path / "keys.json", "journal": tmp_path / "journal"}
    async with staged(make_model_dir(tmp_path / "tiny"), feedback_window_s=0.05, **files) as stage:

        def ended() -> list[tuple[str, str]]:
            return [(one.client or "", one.conversation or "") for one in sessions(stage) if one.finished]

        for name, number in (("honest", 0), *(("hostile", number) for number in range(5)), ("honest", 1)):
            async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=keys[name], max_retries=0) as user:
                await say(user, [], extra_headers={"x-tidegate-session": f"c{number}"})
            await eventually(lambda last=(name, f"c{number}"): last in ended())  # type: ignore[misc]
        kept = [("honest", "c0"), ("hostile", "c3"), ("hostile", "c4"), ("honest", "c1")]
        await eventually(lambda: ended() == kept)
        rows = await stage.client.list_groups()
        assert [row.outcome for row in rows] == ["unrewarded"] * 4
        restored = killed(tmp_path)
    async with staged(tmp_path / "tiny", **files | {"journal": restored}) as stage:
        assert [(one.client, one.conversation) for one in sessions(stage)] == kept
