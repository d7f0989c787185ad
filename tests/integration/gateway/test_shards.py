"""A sharded gateway, with a router and two shards, behaves like a single one.

The quick tests run the shards in this process; the slow ones run them as processes, as the command does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.parse import urlsplit

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from yarl import URL

from tests import REPO
from tests.fakes import Fault, eventually
from tests.remote_workers import WORKER_KEY, Attempts
from tests.sharded_gateway import ASK, SHARDS, TASK, Site, groups, inside, sharded
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.attempt_runner import AttemptRunner
from tidegate.agents.base import FunctionAgent, Session
from tidegate.errors import GatewayError, StartError
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.journal.sqlite import FILE
from tidegate.gateway.sharding import shard as shards_module
from tidegate.gateway.sharding.shard import Shard, journal_of, shard_of_group, shard_of_id
from tidegate.types import Outcome, TaskView

pytestmark = pytest.mark.asyncio(loop_scope="module")


PROCESSES = pytest.param("processes", marks=pytest.mark.slow)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["inside", PROCESSES])
async def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    made = inside(folder) if request.param == "inside" else sharded(folder)
    async with made as site:
        yield site


async def test_a_group_is_on_one_shard_and_agents_call_it_directly(site: Site) -> None:
    ports = {}
    for index, group_id in enumerate(groups("direct")):
        slots = [await site.client.open_session(task=TASK, group_id=group_id, slot=slot) for slot in range(3)]
        assert {shard_of_id(one.session_id, SHARDS) for one in slots} == {index}
        assert {shard_of_id(one.api_key, SHARDS) for one in slots} == {index}
        [ports[index]] = {urlsplit(one.base_url).port for one in slots}
        await site.client.drop_group(group_id)
    assert len({*ports.values(), urlsplit(site.url).port}) == SHARDS + 1
    alone = [await site.client.open_session(task=TASK) for _ in range(4)]
    assert {urlsplit(one.base_url).port for one in alone} == set(ports.values())
    for one in alone:
        await site.client.delete_session(one.session_id)


async def test_a_url_and_a_key_are_enough(site: Site) -> None:
    for _ in range(SHARDS):
        access = await site.client.open_session(task=TASK)
        for stream in (False, True):
            async with site.llm(access, site.url + "/v1") as llm:
                reply: Any = await llm.chat.completions.create(model="m", messages=ASK, stream=stream)
                if stream:
                    text = "".join([one.choices[0].delta.content or "" async for one in reply])
                else:
                    text = reply.choices[0].message.content
                assert text
        summary = await site.client.finish(access.session_id, reward=1.0)
        assert (summary.outcome, summary.turns) == (Outcome.COMPLETED, 2)
        trajectory = await site.client.trajectory(access.session_id)
        assert all(turn.delivered for turn in trajectory.turns)
    async with AsyncOpenAI(base_url=site.url + "/v1", api_key="tg-0.wrong") as llm:
        with pytest.raises(openai.AuthenticationError):
            await llm.chat.completions.create(model="m", messages=ASK)


async def test_a_disconnect_from_the_router_aborts_on_the_engine(site: Site) -> None:
    access = await site.client.open_session(task=TASK)
    site.engine.faults.append(Fault("hang"))
    before = len(site.engine.requests)
    async with site.llm(access, site.url + "/v1") as llm:
        call = asyncio.create_task(llm.chat.completions.create(model="m", messages=ASK))
        await site.engine.until(lambda: len(site.engine.requests) > before)
        call.cancel()
        await site.engine.until(lambda: site.engine.requests[-1]["rid"] in site.engine.aborted)
    await site.client.delete_session(access.session_id)


async def test_leases_are_gathered_and_never_too_many(site: Site) -> None:
    epoch = site.new_epoch()
    names = [f"lease {number}" for number in range(5)]
    for name in names:
        await site.sealed(name)
    assert {shard_of_group(name, SHARDS) for name in names} == {0, 1}
    rows = await site.client.list_groups()
    assert sorted(row.id for row in rows if row.state == "ready") == names
    first = await site.client.lease(epoch, 2)
    rest = await site.client.lease(epoch, 9)
    assert (len(first), len(rest)) == (2, 3)
    assert sorted(group.id for group in first + rest) == names
    assert await site.client.lease(epoch, 9) == []
    for group in first + rest:
        await site.client.ack(epoch, group.lease_id, "trained")
        await site.client.ack(epoch, group.lease_id, "trained")
    assert await site.client.list_groups() == []
    assert await site.client.erased_groups() == []
    with pytest.raises(GatewayError, match="there is no lease"):
        await site.client.ack(epoch, "7.unknown", "trained")


async def test_a_newer_trainer_takes_over_on_every_shard(site: Site) -> None:
    old, names = site.new_epoch(), groups("epochs")
    for name in names:
        await site.sealed(name)
    [kept] = await site.client.lease(old, 1)
    new = site.new_epoch()
    assert len(await site.client.lease(new, 9)) == SHARDS
    late = [site.client.lease(old, 1), site.client.ack(old, kept.lease_id, "trained")]
    late += [site.client.drop_group(name, old) for name in names]
    for call in late:
        with pytest.raises(GatewayError, match="is over") as raised:
            await call
        assert raised.value.status == 410
    for name in names:
        await site.client.drop_group(name, new)


@pytest.mark.parametrize("shard", range(SHARDS))
async def test_a_lease_waits_for_whichever_shard_has_a_group_first(site: Site, shard: int) -> None:
    epoch = site.new_epoch()
    waiting = asyncio.create_task(site.client.lease(epoch, 3, wait_s=30))
    name = groups("waiting")[shard]
    await site.sealed(name)
    [group] = await asyncio.wait_for(waiting, 15)
    assert group.id == name
    await site.client.drop_group(name)


async def test_a_repeated_lease_request_gets_the_same_lease_and_an_undelivered_one_is_released(
    site: Site,
) -> None:
    epoch, names = site.new_epoch(), groups("again")
    waiting = asyncio.create_task(site.client.lease(epoch, 1, wait_s=30))
    await asyncio.sleep(0.1)
    waiting.cancel()
    for name in names:
        await site.sealed(name)
    body = {"trainer_epoch": epoch, "max": 9, "key": "one request"}
    replies = []
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer admin"}) as http:
        for _ in range(2):
            async with http.post(site.url + "/groups/lease", json=body) as response:
                assert response.status == 200
                leased = msgspec.msgpack.decode(await response.read())["groups"]
                replies.append({group["id"]: group["lease_id"] for group in leased})
    assert replies[0] == replies[1]
    assert sorted(replies[0]) == sorted(names)
    assert (await site.client.lease(epoch, 9)) == []
    for name in names:
        await site.client.drop_group(name)


async def test_a_worker_takes_the_attempts_of_every_shard(site: Site) -> None:
    """It calls each shard directly; the router tells who is connected, and passes on that it left."""
    addresses: list[str] = []

    async def answer(task: TaskView, session: Session) -> str:
        addresses.append(session.base_url)
        return "3"

    async with GatewayClient(site.url, site.client.agents_key) as workers:
        stop = asyncio.Event()
        worker = AttemptRunner(site.url, site.client.agents_key, FunctionAgent(answer), 9, lambda _: None)
        running = asyncio.create_task(worker.run(stop))
        for name in groups("attempts"):
            access = await site.client.open_session(
                task=TASK, group_id=name, slot=0, deadline_s=30, offer_heartbeat_s=0.0
            )
            ended = await site.client.result(access.session_id)
            assert ended.outcome is Outcome.AGENT_ERROR, "it made no call"
            assert addresses[-1] == access.base_url
        assert len({urlsplit(address).port for address in addresses}) == SHARDS
        assert await site.client.attempts() == {
            "queued": 0,
            "workers": [
                {"worker": worker.name, "running": 0, "connected": True, "polling": ANY, "seen_s": ANY}
            ],
        }
        stop.set()
        await running
        assert await workers.leave(worker.name) == 2, "the agents that returned, of both shards"
        for name in groups("attempts"):
            await site.client.drop_group(name)


async def offer(site: Site, name: str, slot: int = 0) -> str:
    access = await site.client.open_session(
        task=TASK, group_id=name, slot=slot, deadline_s=60, offer_heartbeat_s=60.0
    )
    return access.session_id


async def drop(site: Site, test: str) -> None:
    for name in groups(test):
        await site.client.drop_group(name)


@contextlib.asynccontextmanager
async def working(site: Site, agent: Any, concurrency: int) -> AsyncIterator[None]:
    """A remote worker, which polls before the block begins."""
    stop = asyncio.Event()
    worker = AttemptRunner(site.url, WORKER_KEY, FunctionAgent(agent), concurrency, lambda _: None)
    running = asyncio.create_task(worker.run(stop))

    async def polls() -> bool:
        workers = (await site.client.attempts())["workers"]
        return any(one["worker"] == worker.name and one["polling"] for one in workers)

    async with asyncio.timeout(20):
        while not await polls():  # noqa: ASYNC110 - the gateway's state
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            stop.set()
            await running


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_remote_worker_runs_no_more_attempts_than_it_may(site: Site, concurrency: int) -> None:
    running, most, go, test = 0, 0, threading.Event(), f"places {concurrency}"

    async def answer(task: TaskView, session: Session) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.to_thread(go.wait, 20)  # the test has another event loop
        running -= 1
        return "3"

    async with working(site, answer, concurrency):
        opened = [await offer(site, name, slot) for slot in range(4) for name in groups(test)]
        queued = len(opened) - concurrency
        while (await site.client.attempts())["queued"] > queued:  # noqa: ASYNC110 - the gateway's state
            await asyncio.sleep(0.01)
        await site.client.attempts()
        go.set()
        for session_id in opened:
            assert (await site.client.result(session_id)).outcome is Outcome.AGENT_ERROR, "it made no call"
    assert most == concurrency
    await drop(site, test)


async def test_a_remote_worker_with_one_place_serves_the_shards_in_turn(site: Site) -> None:
    async def answer(task: TaskView, session: Session) -> str:
        return "3"

    async with working(site, answer, 1):  # a poll of one shard may wait for 30 s
        for name in groups("turn"):
            for slot in range(2):  # the second is on the shard that was polled last
                ended = await site.client.result(await offer(site, name, slot))
                assert ended.outcome is Outcome.AGENT_ERROR, "it made no call"
    await drop(site, "turn")


async def test_a_worker_that_names_no_shard_gets_the_attempts_of_all(site: Site) -> None:
    opened = {await offer(site, name) for name in groups("nameless")}
    async with Attempts(site.url) as worker:
        taken = [attempt for _ in range(SHARDS) for attempt in await worker.next(capacity=9, wait_s=0.0)]
        assert {attempt["attempt"] for attempt in taken} == opened
        for attempt in taken:
            await worker.heartbeat(attempt)
            await worker.finish(attempt, output="3")
    for session_id in opened:
        assert (await site.client.result(session_id)).outcome is Outcome.AGENT_ERROR
    await drop(site, "nameless")


@pytest.mark.skipif(shutil.which("node") is None, reason="the worker in JavaScript needs node")
async def test_the_worker_in_javascript_serves_all_shards(site: Site) -> None:
    script = str(REPO / "examples" / "remote" / "worker.mjs")
    process = await asyncio.create_subprocess_exec(
        "node", script, site.url, "1", env={**os.environ, "TIDEGATE_WORKER_KEY": WORKER_KEY}
    )
    try:
        opened = [await offer(site, name, slot) for slot in range(2) for name in groups("javascript")]
        for session_id in opened:
            ended = await site.client.result(session_id)
            assert (ended.outcome, ended.turns) == (Outcome.REWARD_ERROR, 1), "the gateway has no rewards"
    finally:
        process.kill()
        await process.wait()
    await drop(site, "javascript")


async def test_the_router_refuses_a_worker_without_its_key(site: Site) -> None:
    async with aiohttp.ClientSession() as http:
        for path in ("/attempts/next?shard=1", "/attempts/leave", "/attempts/1.x/heartbeat"):
            for key in ("admin", "wrong"):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(site.url + path, json={"worker": "w"}, headers=headers) as response:
                    assert response.status == 401, path


async def test_the_router_reports_engines_metrics_and_health_of_all_shards(site: Site) -> None:
    [engine] = await site.client.list_engines()
    assert (engine["url"], engine["healthy"], engine["limit"]) == (site.engine.url, True, 256)
    text = await site.client.metrics()
    for index in range(SHARDS):
        assert re.search(rf'^tidegate_gateway_turns_total{{shard="{index}"}} \d+\.0$', text, re.M)
        assert f'tidegate_gateway_engines{{shard="{index}",state="healthy"}} 1.0' in text
    assert text.count("# TYPE tidegate_gateway_turns_total counter") == 1
    assert (await site.client.health())["status"] == "ok"
    async with aiohttp.ClientSession() as http:
        for path, status in (("/ready", 200), ("/engines", 401), ("/metrics", 401), ("/nothing", 404)):
            async with http.get(site.url + path) as response:
                assert response.status == status, path
        async with http.post(site.url + "/sessions", data=b"{") as response:
            assert response.status in (400, 401, 422)


@pytest.mark.slow
async def test_a_shard_that_is_killed_comes_back_at_its_address_with_its_sessions(tmp_path: Path) -> None:
    async with sharded(tmp_path, "--journal", str(tmp_path / "journal")) as site:
        access = await site.client.open_session(task=TASK, group_id="killed", slot=0, deadline_s=60)
        async with site.llm(access) as llm:
            await llm.chat.completions.create(model="m", messages=ASK)
            os.kill(pid_of(access.base_url), signal.SIGKILL)
            # The trainer's calls wait for it, and so do the agent's.
            assert (await site.client.list_engines())[0]["url"] == site.engine.url
            reply = await llm.chat.completions.create(model="m", messages=ASK)
            assert reply.choices[0].message.content
        summary = await site.client.finish(access.session_id, reward=1.0)
        assert (summary.outcome, summary.turns) == (Outcome.COMPLETED, 2)
        restarts = re.findall(r'shard_restarts_total{shard="(\d)"} (\d)', await site.client.metrics())
        assert dict(restarts)[str(shard_of_id(access.session_id, SHARDS))] == "1"


@pytest.mark.slow
async def test_without_a_journal_a_killed_shard_loses_its_sessions_and_nothing_else(tmp_path: Path) -> None:
    async with sharded(tmp_path) as site:
        lost, kept = [await site.client.open_session(task=TASK, group_id=name) for name in groups("lost")]
        os.kill(pid_of(lost.base_url), signal.SIGKILL)
        async with site.llm(kept) as llm:
            assert await llm.chat.completions.create(model="m", messages=ASK)
        with pytest.raises(GatewayError, match="there is no session") as raised:
            await site.client.finish(lost.session_id)
        assert raised.value.status == 404
        # The new one knows the engine that was added to the old one.
        again = await site.client.open_session(task=TASK, group_id=groups("lost")[0], deadline_s=15)
        assert urlsplit(again.base_url).port == urlsplit(lost.base_url).port
        async with site.llm(again) as llm:
            assert await llm.chat.completions.create(model="m", messages=ASK, timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_stopped_router_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    model, announce, place = make_model_dir(tmp_path / "tiny"), tmp_path / "router.json", tmp_path / "tmp"
    place.mkdir()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", "gateway", "--model.path", str(model), f"--gateway.shards={SHARDS}",
        "--gateway.port=0", "--announce", str(announce), env={**os.environ, "TMPDIR": str(place)},
    )  # fmt: skip
    try:
        await eventually(lambda: announce.exists() or process.returncode is not None, 90)
        assert [one.name.startswith("tidegate-router-") for one in place.iterdir()] == [True]
        process.send_signal(how)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not list(place.iterdir())


def pid_of(base_url: str) -> int:
    """The shard that listens on an address; its router holds that port, too."""
    port = f":{urlsplit(base_url).port:04X}"
    table = Path("/proc/net/tcp").read_text()
    rows = [line.split() for line in table.splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1].endswith(port) and row[3] == "0A"}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            shard = process.name.isdecimal() and b"\0--shard\0" in (process / "cmdline").read_bytes()
            for handle in (process / "fd").iterdir() if shard else ():
                if os.readlink(handle) in {f"socket:[{inode}]" for inode in inodes}:
                    return int(process.name)
    raise AssertionError(f"nobody listens on {base_url}")


async def test_a_shard_that_exits_again_and_again_ends_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exiting:
        url = "http://127.0.0.1:9"
        starts = 0

        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def start(self) -> None:
            Exiting.starts += 1

        async def wait_for_exit(self) -> str:
            return "the shard was killed by SIGKILL"

        restart = start

    async def prepared(_: Shard) -> None: ...

    monkeypatch.setattr(shards_module, "Service", Exiting)
    shard = Shard(0, [], tmp_path, {})
    await shard.start()
    with pytest.raises(StartError, match="SIGKILL, 6 times in a row"):
        await asyncio.wait_for(shard.supervise(prepared), 5)
    assert Exiting.starts == 6
    assert not shard.up.is_set()


async def test_a_journal_of_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    assert journal_of(tmp_path, 0, 2) == tmp_path / "shard-0-of-2"
    assert journal_of(tmp_path, 0, 1) == tmp_path
    (tmp_path / "shard-0-of-3").mkdir()
    for shards in (1, 2):
        with pytest.raises(StartError, match="shard-0-of-3"):
            journal_of(tmp_path, 0, shards)
    (tmp_path / "shard-0-of-3").rename(tmp_path / FILE)
    with pytest.raises(StartError, match=r"journal\.sqlite is from one"):
        journal_of(tmp_path, 0, 2)


@pytest.mark.parametrize(
    ("path", "status"), [("models", 200), ("models%3Fa=1", 404), ("models/%2e%2e/models", 404)]
)
async def test_the_router_forwards_a_path_unchanged(site: Site, path: str, status: int) -> None:
    access = await site.client.open_session()
    session, key = f"/s/{access.session_id}/v1/", {"Authorization": f"Bearer {access.api_key}"}
    answers = []
    async with aiohttp.ClientSession(headers=key) as http:
        for url in (site.url, access.base_url.partition("/s/")[0]):
            async with http.get(URL(url + session + path, encoded=True)) as response:
                answers.append((response.status, await response.read()))
    assert answers[0] == answers[1], "through the router as at the shard itself"
    assert answers[0][0] == status


async def test_the_router_streams_a_body(site: Site) -> None:
    """The shard refuses by the key before the body is whole, and the answer comes back."""
    port = int(site.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer no\r\n"
    writer.write(f"{head}content-length: 60000000\r\n\r\n{{".encode())
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401")
