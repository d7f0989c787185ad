"""Attempts of a gateway process that is killed with -9: before, while and after a worker takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes import FakeEngine
from tests.gateway_process import GatewayProcess, running
from tests.integration.gateway.control_stage import ask
from tests.remote_workers import WORKER_KEY, Attempts, Refused
from tests.tiny_tokenizer import make_model_dir, make_tokenizer
from tidegate.gateway.client import SessionAccess
from tidegate.types import Outcome, Task

TASK = Task("t1", "none", [{"role": "user", "content": "?"}])


async def offer(gateway: GatewayProcess, heartbeat_s: float = 60.0, deadline_s: float = 60.0) -> str:
    access = await gateway.client.open_session(
        task=TASK, deadline_s=deadline_s, epoch=1, offer_heartbeat_s=heartbeat_s
    )
    return access.session_id


async def killed(gateway: GatewayProcess) -> None:
    gateway.kill()
    await gateway.until_died(gateway.deaths + 1)
    await gateway.until_up()


async def patient(call: Any) -> Any:
    """Repeats a call while the gateway is down, as a worker does."""
    while True:
        try:
            return await call()
        except aiohttp.ClientError:
            await asyncio.sleep(0.05)


async def test_attempts_that_no_worker_had_are_offered_again(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    async with (
        running(model, tmp_path, worker_key=WORKER_KEY) as gateway,
        Attempts(gateway.url) as worker,
    ):
        opened = [await offer(gateway) for _ in range(3)]
        waiting = asyncio.create_task(gateway.client.result(opened[0]))
        await killed(gateway)
        taken = await patient(lambda: worker.next(9))
        assert [row["attempt"] for row in taken] == opened
        await worker.finish(taken[0], outcome="cancelled")
        assert (await waiting).outcome is Outcome.CANCELLED, "the trainer's wait outlasts the kill"


async def test_a_worker_goes_on_with_its_attempt_after_a_kill(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    engine = FakeEngine(make_tokenizer().decode)
    await engine.start()
    try:
        async with (
            running(model, tmp_path, worker_key=WORKER_KEY) as gateway,
            Attempts(gateway.url) as worker,
        ):
            await gateway.client.add_engine(engine.url)
            session_id = await offer(gateway)
            [attempt] = await worker.next()
            await killed(gateway)
            await worker.heartbeat(attempt)
            assert await worker.next(wait_s=0) == [], "it is not given to a second worker"
            await ask(SessionAccess(session_id, attempt["base_url"], attempt["api_key"]))
            await worker.finish(attempt, output="out", reward=1.0)
            await killed(gateway)
            summary = await gateway.client.result(session_id)
            assert (summary.outcome, summary.reward) == (Outcome.COMPLETED, 1.0)
            repeated = await worker.finish(attempt, output="out")
            assert repeated == {"state": "finished", "outcome": "completed", "error": None}
    finally:
        await engine.stop()


async def test_an_attempt_whose_worker_does_not_come_back_after_a_kill_is_lost(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    async with (
        running(model, tmp_path, worker_key=WORKER_KEY) as gateway,
        Attempts(gateway.url) as worker,
    ):
        session_id = await offer(gateway, heartbeat_s=0.3)
        [attempt] = await worker.next()
        await killed(gateway)
        summary = await gateway.client.result(session_id)
        assert summary.outcome is Outcome.INFRA_ERROR
        assert "sent no heartbeat" in str(summary.error)
        await killed(gateway)
        with pytest.raises(Refused, match="sent no heartbeat") as refused:
            await worker.finish(attempt, output="late")
        assert refused.value.status == 410


async def test_after_a_kill_a_newer_trainer_still_ends_the_attempts_of_the_older(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    async with (
        running(model, tmp_path, worker_key=WORKER_KEY) as gateway,
        Attempts(gateway.url) as worker,
    ):
        await offer(gateway)
        [taken] = await worker.next()
        queued = await offer(gateway)
        await killed(gateway)
        await gateway.client.begin_epoch(2)
        for session_id in (queued, taken["attempt"]):
            assert (await gateway.client.result(session_id)).outcome is Outcome.CANCELLED
        with pytest.raises(Refused, match="has ended") as refused:
            await worker.heartbeat(taken)
        assert refused.value.status == 410


@pytest.mark.parametrize("point", ["offered.before", "offered.within", "offered.after"])
async def test_a_kill_while_a_worker_takes_an_attempt_loses_none(tmp_path: Path, point: str) -> None:
    """The poll gets no answer; the attempt is queued again, or lost to a worker that sends no heartbeat."""
    model = make_model_dir(tmp_path / "tiny")
    async with (
        running(model, tmp_path, point, worker_key=WORKER_KEY) as gateway,
        Attempts(gateway.url) as worker,
    ):
        session_id = await offer(gateway, heartbeat_s=0.3)
        waiting = asyncio.create_task(gateway.client.result(session_id))
        with pytest.raises(aiohttp.ClientError):
            await worker.next()
        await gateway.until_died(1)
        if point == "offered.after":
            assert (await waiting).outcome is Outcome.INFRA_ERROR
        else:
            [attempt] = await patient(worker.next)
            assert attempt["attempt"] == session_id
            await worker.finish(attempt, outcome="cancelled")
            assert (await waiting).outcome is Outcome.CANCELLED


async def test_an_attempt_that_the_runs_own_agents_did_not_receive_is_no_fault_of_its_task(
    tmp_path: Path,
) -> None:
    """They send no heartbeats, so that it ends at its deadline only."""
    model = make_model_dir(tmp_path / "tiny")
    async with (
        running(model, tmp_path, "offered.after", worker_key=WORKER_KEY) as gateway,
        Attempts(gateway.url) as agents,
    ):
        session_id = await offer(gateway, heartbeat_s=0.0, deadline_s=1.0)
        waiting = asyncio.create_task(gateway.client.result(session_id))
        body = {"worker": "agent-1", "capacity": 9, "wait_s": 5.0}
        with pytest.raises(aiohttp.ClientError):
            await agents.post("/attempts/next", gateway.client.agents_key, body)
        await gateway.until_died(1)
        assert (await waiting).outcome is Outcome.INFRA_ERROR
