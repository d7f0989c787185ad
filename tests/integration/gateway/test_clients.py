"""Groups that clients form with a project key: what the key opens, and what becomes of a group."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.fakes import Fault, Stage, eventually, staged
from tests.integration.gateway.control_stage import TASK
from tests.integration.gateway.test_journal import killed
from tests.tiny_tokenizer import make_model_dir
from tidegate.client import Client, ClientGroup
from tidegate.client.groups import LEAVE_S
from tidegate.config import load_settings
from tidegate.envs.arithmetic import Arithmetic
from tidegate.errors import GatewayError, GroupRefusedError
from tidegate.gateway.project_keys import create_key, revoke_key
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.trainer.rollout.pause import Pause
from tidegate.trainer.rollout.rollout import Rollout
from tidegate.types import Group, Outcome

ASK = [{"role": "user", "content": "1+2?"}]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(keys: Path) -> str:
    return create_key(keys, "me")


@pytest.fixture
async def stage(tmp_path: Path, keys: Path, key: str) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, keys=keys, max_client_groups=2, journal=tmp_path / "journal") as made:
        yield made


@pytest.fixture
async def client(stage: Stage, key: str) -> AsyncIterator[Client]:
    async with Client(stage.url, key, timeout_s=5, capacity_s=0) as made:
        yield made


async def episode(group: ClientGroup, reward: float | None = 1.0) -> None:
    async with group.episode({"from": "a test"}) as run:
        await run.openai().chat.completions.create(model="policy", messages=ASK)
        run.output, run.reward, run.metrics = "3", reward, {"tries": 1.0}


async def formed(client: Client, rewards: tuple[float, ...] = (0.0, 1.0)) -> ClientGroup:
    async with client.group("my task") as group:
        await asyncio.gather(*(episode(group, reward) for reward in rewards))
    return group


async def leased(stage: Stage, epoch: int = 1) -> Group:
    [group] = await stage.client.lease(epoch, 1, wait_s=5)
    return group


async def test_a_group_reaches_the_trainer_and_its_client_learns_the_step(
    stage: Stage, client: Client
) -> None:
    await stage.client.begin_epoch(1)
    group = await formed(client)
    waiting = asyncio.ensure_future(group)
    sealed = await leased(stage)
    assert (sealed.id, sealed.task_id, sealed.client) == (f"me.{group.name}", "my task", "me")
    assert [trajectory.slot for trajectory in sealed.trajectories] == [0, 1]
    assert sorted(sealed.rewards()) == [0.0, 1.0]
    one = sealed.trajectories[0]
    assert (one.task_id, one.output, one.metrics["tries"], one.metadata) == (
        "my task", "3", 1.0, {"from": "a test"},
    )  # fmt: skip
    assert one.oldest_version() == 0
    await stage.client.ack(1, sealed.lease_id, "stepped", "step 7")
    assert (await waiting).step == 7
    assert (await group).step == 7, "it is remembered"
    assert stage.gateway.sessions.all() == []


@pytest.mark.parametrize("why", [None, "stale: its oldest token is of version 0"])
async def test_a_group_that_was_not_trained_on_raises_with_the_reason(
    stage: Stage, client: Client, why: str | None
) -> None:
    group = await formed(client)
    await stage.client.ack(1, (await leased(stage)).lease_id, "refused", why)
    with pytest.raises(
        GroupRefusedError, match=f"my task ended refused{': stale' if why else '$'}"
    ) as refused:
        await group
    assert refused.value.state == "refused"


async def test_episodes_share_connections_that_are_closed_with_the_client(stage: Stage, key: str) -> None:
    async with (
        Client(stage.url, key) as client,
        client.group("my task") as group,
        group.episode() as first,
        group.episode() as second,
    ):
        clients = [run.openai() for run in (first, second)]
        for llm in clients:
            await llm.chat.completions.create(model="policy", messages=ASK)
        first.reward = second.reward = 1.0
    assert clients[0].api_key != clients[1].api_key
    assert clients[0]._client is clients[1]._client
    assert clients[0].is_closed()


async def test_a_run_that_ends_tells_all_that_wait_and_is_then_not_waited_for(
    tmp_path: Path, keys: Path, key: str
) -> None:
    async with asyncio.timeout(40), contextlib.AsyncExitStack() as stack:
        stage = await stack.enter_async_context(
            staged(make_model_dir(tmp_path / "tiny"), keys=keys, max_client_groups=2)
        )
        await stage.client.begin_epoch(1)
        async with Client(stage.url, key) as client:
            offered, opened = await formed(client), client.group("not offered")
            await episode(opened)
            waiting = [asyncio.ensure_future(group._end()) for group in (offered, opened)]
            beginning = [asyncio.create_task(formed(client)) for _ in range(13)]
            await eventually(lambda: client._beginning.locked())
            await stage.client.end_run(1, "completed after step 40")
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert {getattr(end, "status", None) for end in ends} == {410}, ends
            await stack.aclose()
            ends += await asyncio.gather(*beginning, formed(client), return_exceptions=True)
            assert all("completed after step 40" in str(end) for end in ends), ends
            assert len(ends) == 16


async def test_a_new_run_at_the_same_gateway_accepts_groups_again(stage: Stage, client: Client) -> None:
    await stage.client.end_run(1, "interrupted after step 3")
    with pytest.raises(GatewayError, match="interrupted after step 3"):
        await formed(client)
    await stage.client.begin_epoch(2)
    assert (await formed(client)).failures == []
    with pytest.raises(GatewayError, match="trainer epoch 1 is over"):
        await stage.client.end_run(1, "a late word of the first run")


async def test_a_run_that_ends_tells_the_client_of_an_accepted_group(stage: Stage, client: Client) -> None:
    group = await formed(client)
    settings = load_settings(None, ["--model.path=x", "--trainer.group_size=2"])
    entries: list[Any] = []
    admission = Admission(Rules.of(settings), entries.append)
    pause = Pause(admission=admission, note=print, limit_s=3600.0)
    source = EpisodeSource(stage.client, 5.0, epoch=1)

    async def nothing(*_: object) -> None: ...

    rollout = Rollout(
        settings=settings,
        admission=admission,
        episodes=source,
        tasks=Arithmetic(),
        save=nothing,
        dead_letter=nothing,
        pause=pause,
    )
    assert admission.accept(await leased(stage)) is None
    await rollout.stop()
    with pytest.raises(
        GroupRefusedError, match="ended dropped: the run ended before a batch had the group"
    ) as refused:
        await group
    assert refused.value.state == "dropped"
    assert entries[-1]["state"] == "cancelled"


async def test_rewards_and_metrics_may_be_numpys(stage: Stage, client: Client) -> None:
    async with client.group("my task") as group, group.episode() as run:
        await run.openai().chat.completions.create(model="policy", messages=ASK)
        run.reward, run.metrics = np.float32(0.5), {"right": np.bool_(True)}
    (trajectory,) = (await leased(stage)).trajectories
    assert (trajectory.reward, trajectory.metrics["right"]) == (0.5, 1.0)


async def test_failed_episodes_are_left_out_and_named(stage: Stage, client: Client) -> None:
    async with client.group("my task") as group:
        await episode(group)
        with pytest.raises(KeyError, match="lost"):
            await failing(group)
        with pytest.raises(ValueError, match=r"reward is None, not a finite number: set episode\.reward"):
            await episode(group, None)
        async with group.episode() as silent:
            silent.reward = 1.0
    assert len((await leased(stage)).trajectories) == 1
    assert [text.partition(":")[0] for text in group.failures] == ["agent_error"] * 3
    assert "KeyError: 'lost'" in group.failures[0]
    assert "never called the gateway" in group.failures[2]


async def failing(group: ClientGroup) -> None:
    async with group.episode():
        raise KeyError("lost")


async def test_a_group_whose_block_raises_is_dropped(stage: Stage, client: Client) -> None:
    with pytest.raises(KeyError):
        await dropped(client)
    assert stage.gateway.sessions.all() == []
    assert await stage.client.lease(1, 1) == []


async def dropped(client: Client) -> None:
    async with client.group("my task") as group:
        await episode(group)
        raise KeyError


async def test_a_group_without_an_episode_to_train_on_is_refused(client: Client) -> None:
    with pytest.raises(GroupRefusedError, match=r"no episode of it has a reward; 1 of its episodes failed"):
        await empty(client)


async def empty(client: Client) -> None:
    async with client.group("my task") as group:
        with pytest.raises(KeyError):
            await failing(group)


async def test_groups_beyond_the_capacity_wait_for_one_to_end(stage: Stage, key: str) -> None:
    async with Client(stage.url, key) as client:
        first, _ = await formed(client), await formed(client)
        third = asyncio.create_task(formed(client))
        await eventually(lambda: third.done() or client._beginning.locked())
        assert not third.done()
        await stage.client.ack(1, (await leased(stage)).lease_id, "stepped", "step 1")
        await third
        assert (await first).step == 1
    async with Client(stage.url, key, timeout_s=0.1, capacity_s=0) as hasty:
        with pytest.raises(GatewayError, match="2 groups of clients have not ended") as refused:
            await formed(hasty)
        assert refused.value.status == 429


async def test_a_restarted_gateway_has_the_groups(
    stage: Stage, client: Client, tmp_path: Path, keys: Path, key: str
) -> None:
    await stage.client.begin_epoch(1)
    group = await formed(client)
    async with client.group("another") as other:
        await episode(other)
        copy = killed(tmp_path, "first")
    async with (
        staged(tmp_path / "tiny", keys=keys, journal=copy) as again,
        aiohttp.ClientSession() as http,
    ):
        sessions = [one.id for one in again.gateway.sessions.of_group(f"me.{other.name}")]
        assert await call(http, again, "POST", f"{other.name}/seal", key, {"sessions": sessions}) == {}
        found = [await leased(again) for _ in range(2)]
        assert [(one.id, one.client, one.task_id, sorted(one.rewards())) for one in found] == [
            (f"me.{group.name}", "me", "my task", [0.0, 1.0]), (f"me.{other.name}", "me", "another", [1.0]),
        ]  # fmt: skip
        await again.client.ack(1, found[0].lease_id, "stepped", "step 3")
        copy = shutil.copytree(copy, tmp_path / "second")
    async with staged(tmp_path / "tiny", keys=keys, journal=copy) as last, aiohttp.ClientSession() as http:
        assert await call(http, last, "GET", group.name, key) == {
            "group": group.name, "state": "stepped", "ended": True, "why": "step 3",
        }  # fmt: skip


async def test_a_repeated_request_opens_no_second_episode(stage: Stage, key: str) -> None:
    body = {"task_id": "t", "key": "k" * 32}
    async with aiohttp.ClientSession() as http:
        rows = [await call(http, stage, "POST", "g1/episodes", key, body) for _ in range(2)]
    assert rows[0] == rows[1]
    assert len(stage.gateway.sessions.all()) == 1


async def call(
    http: aiohttp.ClientSession, stage: Stage, method: str, path: str, key: str, body: object = None
) -> object:
    """Returns the response, or the status and message of a refusal."""
    headers = {"Authorization": f"Bearer {key}"}
    async with http.request(method, f"{stage.url}/v1/groups/{path}", json=body, headers=headers) as response:
        row = await response.json()
        return row if response.status < 400 else (response.status, row["error"]["message"])


async def test_each_key_opens_its_own_routes(stage: Stage, keys: Path, key: str) -> None:
    other = create_key(keys, "other")
    stage.gateway.keys.reload()
    body = {"task_id": "t"}
    async with aiohttp.ClientSession() as http:
        access = await call(http, stage, "POST", "g1/episodes", key, body)
        assert isinstance(access, dict)
        for wrong in ("", "tg-project-no", access["api_key"]):
            refused = await call(http, stage, "POST", "g1/episodes", wrong, body)
            assert refused[0] == 401  # type: ignore[index]
            assert "needs a project key of this gateway: `tidegate keys create NAME`" in refused[1]  # type: ignore[index]
        status, message = await call(http, stage, "GET", "g1", other)  # type: ignore[misc]
        assert (status, message) == (404, "there is no group 'g1', or its episodes have expired")
        headers = {"Authorization": f"Bearer {key}"}
        async with http.get(f"{access['base_url']}/models", headers=headers) as response:
            assert response.status == 401, "a project key is no session's key"
        revoke_key(keys, "me")
        stage.gateway.keys.reload()
        assert (await call(http, stage, "GET", "g1", key))[0] == 401  # type: ignore[index]
        assert (await call(http, stage, "POST", "g2/episodes", other, body))["model"] == "policy"  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "why"),
    [
        ("POST", "a.b/episodes", {"task_id": "t"}, 400, "1 to 64 letters, digits, - or _; not 'a.b'"),
        ("POST", "g/episodes", {}, 400, "task_id: Field required"),
        ("POST", "g/episodes", {"task_id": "t", "slot": 1}, 400, "slot: Extra inputs"),
        ("POST", "g/seal", {"sessions": []}, 400, "sessions: List should have at least 1"),
        ("POST", "g/seal", {"sessions": ["no"]}, 404, "there is no session no"),
        ("GET", "g", None, 404, "there is no group 'g'"),
        ("GET", "g?wait_s=nan", None, 400, "wait_s is 'nan', not seconds from 0 to 60"),
        ("DELETE", "g", None, 404, "there is no group 'g' of this key"),
    ],
)
async def test_what_is_wrong_is_named(
    stage: Stage, key: str, method: str, path: str, body: object, status: int, why: str
) -> None:
    async with aiohttp.ClientSession() as http:
        answer = await call(http, stage, method, path, key, body)
    assert isinstance(answer, tuple)
    assert answer[0] == status
    assert why in answer[1]


async def test_only_what_clients_formed_may_be_sealed_beside_a_trainer(stage: Stage, client: Client) -> None:
    """A trainer leads the gateway; its own groups need its epoch, a client's do not."""
    await stage.client.add_engine(stage.engine.url, admitted=True)
    await formed(client)
    access = await stage.client.open_session(task=TASK, group_id="mine", slot=0)
    with pytest.raises(GatewayError, match="a trainer manages this gateway"):
        await stage.client.seal_group("mine", "t1", [access.session_id])
    assert (await leased(stage)).client == "me"


async def test_a_client_cannot_take_a_sealed_group_back(stage: Stage, client: Client, key: str) -> None:
    group = await formed(client)
    async with aiohttp.ClientSession() as http:
        answer = await call(http, stage, "DELETE", group.name, key)
    assert answer == (409, f"group {group.name!r} is sealed: the trainer may have leased it")
    assert (await leased(stage)).id == f"me.{group.name}"


async def test_an_engine_that_fails_makes_the_episode_fail(stage: Stage, client: Client) -> None:
    """Not a reward of 0: the episode is left out."""
    async with client.group("my task") as group:
        await episode(group)
        stage.engine.faults.extend([Fault("refuse", "no")] * 9)
        async with group.episode() as run:
            with pytest.raises(Exception, match="no"):
                await run.openai().chat.completions.create(model="policy", messages=ASK)
            run.reward = 0.0
    assert [text.partition(":")[0] for text in group.failures] == [Outcome.INFRA_ERROR.value]
    assert [one.reward for one in (await leased(stage)).trajectories] == [1.0]


async def test_a_cancelled_group_ends_soon_though_the_gateway_is_gone(stage: Stage, key: str) -> None:
    client = Client("http://127.0.0.1:9", key)
    opening = asyncio.create_task(formed(client))
    await eventually(client._beginning.locked)
    opening.cancel()
    async with asyncio.timeout(2 * LEAVE_S):
        await asyncio.gather(opening, return_exceptions=True)
    assert opening.cancelled()
    await client.close()
    with pytest.raises(GatewayError, match="the client is closed"):
        await formed(client)


async def test_all_groups_that_wait_fail_together_once_the_gateway_is_gone(key: str) -> None:
    async with Client("http://127.0.0.1:9", key, timeout_s=1.0) as client:
        async with asyncio.timeout(10):  # one wait for all: fifteen would take more than fifteen seconds
            failed = await asyncio.gather(*(formed(client) for _ in range(15)), return_exceptions=True)
    assert all("no response from the gateway at http://127.0.0.1:9" in str(one) for one in failed)
