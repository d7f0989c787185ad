"""`DELETE /v1/conversations/…`: what is deleted, in every state of a conversation, and for whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.test_clients import call as group_call
from tests.integration.gateway.test_conversations import feedback, say, sessions
from tests.integration.gateway.test_journal import killed
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.groups import store
from tidegate.gateway.journal import sqlite
from tidegate.gateway.project_keys import create_key

SECRET = "a secret of anna"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {name: create_key(tmp_path / "keys.json", name) for name in ("me", "you")}


@pytest.fixture
async def stage(tmp_path: Path, keys: dict[str, str]) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    options: dict[str, Any] = {"keys": tmp_path / "keys.json", "conversation_idle_s": 0.2}
    async with staged(model, journal=tmp_path / "journal", **options) as made:
        yield made


@pytest.fixture
async def user(stage: Stage, keys: dict[str, str]) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=keys["me"], max_retries=0) as made:
        yield made


async def erase(stage: Stage, key: str, name: str, *, again: bool | None = None) -> Any:
    """Returns the group, or the status of a refusal; `again`: whether it must have been erased before."""
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{stage.url}/v1/conversations/{name}"
    async with aiohttp.ClientSession() as http, http.delete(url, headers=headers) as response:
        row = await response.json()
        assert again is None or row["already_erased"] is again
        return row["group"] if response.status == 200 else response.status


def kept(stage: Stage, directory: Path) -> bool:
    """Whether memory or the journal's files have the secret."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    in_files = any(SECRET.encode() in path.read_bytes() for path in files)
    return in_files or any(SECRET in str(one.tree.nodes) for one in sessions(stage))


async def test_a_conversation_is_erased_by_a_reply_its_name_or_its_group(
    stage: Stage, user: AsyncOpenAI, keys: dict[str, str], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    reply = await say(user, [], SECRET)
    assert kept(stage, journal)
    assert await erase(stage, keys["you"], reply.id) == 404, "another key's"
    group = await erase(stage, keys["me"], reply.id, again=False)
    assert sessions(stage) == []
    await eventually(lambda: not kept(stage, journal))
    await say(user, [], SECRET, extra_headers={"x-tidegate-session": "tuesday"})
    assert await erase(stage, keys["me"], "tuesday") != group
    await eventually(lambda: not kept(stage, journal))
    assert await erase(stage, keys["me"], "tuesday") == 404
    assert await erase(stage, keys["me"], group, again=True) == group, "a repeated one"
    assert await stage.client.erased_groups() != []
    status, _ = await feedback(stage, keys["me"], reply.id, "up")
    assert status == 404


@pytest.mark.parametrize("state", ["ready", "leased", "stepped"])
async def test_what_the_trainer_has_is_listed_for_it(
    stage: Stage, user: AsyncOpenAI, keys: dict[str, str], tmp_path: Path, state: str
) -> None:
    reply = await say(user, [], SECRET)
    group = (await feedback(stage, keys["me"], reply.id, "up"))["group"]
    await eventually(lambda: stage.gateway.groups.get(f"me.{group}") is not None)
    lease = ""
    if state != "ready":
        [leased] = await stage.client.lease(1, 1)
        lease = leased.lease_id
    if state == "stepped":
        await stage.client.ack(1, lease, "stepped", "step 1")
    assert await erase(stage, keys["me"], group) == group
    assert await stage.client.erased_groups() == [f"me.{group}"]
    await eventually(lambda: not kept(stage, tmp_path / "journal"))
    if state == "leased":
        await stage.client.ack(1, lease, "stepped", "step 1")
    await stage.client.drop_group(f"me.{group}", 1)
    assert await stage.client.erased_groups() == [f"me.{group}"], "no other end replaces it"
    assert await stage.client.lease(1, 1) == []


async def test_an_erasure_outlives_a_kill(
    stage: Stage, user: AsyncOpenAI, keys: dict[str, str], tmp_path: Path
) -> None:
    reply = await say(user, [], SECRET)
    group = await erase(stage, keys["me"], reply.id)
    copy = killed(tmp_path)
    async with staged(tmp_path / "tiny", journal=copy, keys=tmp_path / "keys.json") as after:
        assert await after.client.erased_groups() == [f"me.{group}"]
        assert sessions(after) == []


async def test_an_erasure_is_kept_until_a_trainer_has_carried_it_out(
    stage: Stage, user: AsyncOpenAI, keys: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "REMEMBERED", 2)
    monkeypatch.setattr(sqlite, "_FORGET_ENDED", (sqlite._FORGET_ENDED[0], [(2,)]))
    reply = await say(user, [], SECRET)
    group = await erase(stage, keys["me"], reply.id)
    async with aiohttp.ClientSession() as http:
        for number in range(6):  # another key's names, that never existed and that did
            assert (await group_call(http, stage, "DELETE", f"no{number}", keys["you"]))[0] == 404
            await group_call(http, stage, "POST", f"g{number}/episodes", keys["you"], {"task_id": "t"})
            assert await group_call(http, stage, "DELETE", f"g{number}", keys["you"]) == {}
    assert await stage.client.erased_groups() == [f"me.{group}"]
    assert await erase(stage, keys["me"], group) == group, "repeated"
    copy = killed(tmp_path, "before")
    async with staged(tmp_path / "tiny", journal=copy, keys=tmp_path / "keys.json") as after:
        assert await after.client.erased_groups() == [f"me.{group}"]
        await after.client.acknowledge_erasures([f"me.{group}", "unknown"])
        assert after.gateway.groups._erasures == {}
    async with staged(tmp_path / "tiny", journal=copy, keys=tmp_path / "keys.json") as after:
        assert after.gateway.groups._erasures == {}


async def test_erasures_that_no_trainer_reads_are_bounded_for_each_key(
    stage: Stage, user: AsyncOpenAI, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "REMEMBERED", 1)
    for expected in (str, int):
        reply = await say(user, [], SECRET)
        assert isinstance(answer := await erase(stage, keys["me"], reply.id), expected)
    assert answer == 429
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=keys["you"], max_retries=0) as other:
        reply = await say(other, [], SECRET)
    assert isinstance(await erase(stage, keys["you"], reply.id), str)
