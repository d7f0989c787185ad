"""Attempts that workers take: who gets them, when they end, and what each key opens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.control_stage import TASK, Sums, ask
from tests.remote_workers import WORKER_KEY, Attempts, Refused
from tests.serving import GRACE_S, served
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway import attempts as queues
from tidegate.gateway.attempts import LOST_AFTER
from tidegate.gateway.client import SessionAccess, SessionSummary
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.ids import agents_key
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.sessions.session import SessionRequest
from tidegate.types import MAX_ERROR, MAX_METRICS, MAX_OUTPUT, Outcome

SOON_S = 0.3


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, rewarders={"sums": Sums()}, worker_key=WORKER_KEY) as made:
        yield made


@pytest.fixture
async def worker(stage: Stage) -> AsyncIterator[Attempts]:
    async with Attempts(stage.url) as made:
        yield made


async def offer(stage: Stage, **options: Any) -> str:
    arguments = {"task": TASK, "deadline_s": 20.0, "offer_heartbeat_s": 60.0, **options}
    return (await stage.client.open_session(**arguments)).session_id


async def talk(attempt: dict[str, Any]) -> None:
    await ask(SessionAccess(attempt["attempt"], attempt["base_url"], attempt["api_key"]))


async def test_a_worker_runs_an_attempt_from_the_queue_to_its_reward(stage: Stage, worker: Attempts) -> None:
    waiting = asyncio.create_task(worker.next(wait_s=10))
    await asyncio.sleep(0.05)
    session_id = await offer(stage, seed=7)
    result = asyncio.create_task(stage.client.result(session_id))
    [attempt] = await waiting
    assert attempt == {
        "attempt": session_id, "task": {"id": "t1", "messages": TASK.messages},
        "base_url": f"{stage.url}/s/{session_id}/v1", "tools_url": f"{stage.url}/s/{session_id}/tools",
        "mcp_url": f"{stage.url}/s/{session_id}/mcp", "api_key": attempt["api_key"],
        "finish_key": attempt["finish_key"], "model": "policy", "seed": 7, "deadline_s": 20.0,
        "heartbeat_s": 60.0,
    }, "nothing of the answer"  # fmt: skip
    await talk(attempt)
    await worker.heartbeat(attempt)
    for _ in range(2):
        assert await worker.finish(attempt, output="3", metrics={"tries": 1}) == {
            "state": "finished", "outcome": "completed", "error": None,
        }  # fmt: skip
    summary = await result
    assert (summary.outcome, summary.reward, summary.turns) == (Outcome.COMPLETED, 1.0, 1)
    assert (await stage.client.trajectory(session_id)).metrics["tries"] == 1
    with pytest.raises(Refused, match="it was finished") as refused:
        await worker.heartbeat(attempt)
    assert refused.value.status == 410


async def test_a_poll_without_attempts_is_answered_in_time(worker: Attempts) -> None:
    async with asyncio.timeout(5):
        assert await worker.next(wait_s=0) == []
        assert await worker.next(wait_s=0.1) == []


async def test_a_server_that_stops_answers_polls_that_wait(tmp_path: Path) -> None:
    gateway = Gateway(GatewayOptions(model=make_model_dir(tmp_path / "tiny"), worker_key=WORKER_KEY))
    loop = asyncio.get_running_loop()
    async with Attempts("") as worker:
        async with served(create_app(gateway)) as worker.url:
            waiting = asyncio.create_task(worker.next(wait_s=60))
            await eventually(lambda: bool(gateway.attempts.workers()))
            stopped = loop.time()
        assert loop.time() - stopped < GRACE_S, "the server did not wait for the poll"
        with pytest.raises(Refused, match="the server stops") as refused:
            await waiting
    assert refused.value.status == 503
    assert not any(row["polling"] for row in gateway.attempts.workers())


async def test_polls_are_served_in_the_order_in_which_they_came(stage: Stage, worker: Attempts) -> None:
    polls = []
    for number in range(4):
        polls.append(asyncio.create_task(worker.next(wait_s=10, worker=f"w{number}")))
        await asyncio.sleep(0.03)
    opened = [await offer(stage) for _ in polls]
    taken = [(await poll)[0]["attempt"] for poll in polls]
    assert taken == opened


async def test_an_attempt_wakes_one_of_a_thousand_polls(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def pop(line: Any, poll: Any) -> Any:
        looked.append(poll.worker)
        return original(line, poll)

    original = queues._Queue.pop
    monkeypatch.setattr(queues._Queue, "pop", pop)
    attempts = stage.gateway.attempts
    polls = [asyncio.create_task(attempts.take(f"w{number}", 1, 60.0)) for number in range(1000)]
    await eventually(lambda: len(attempts.workers()) == 1000)
    assert looked == [], "a poll that waits does nothing"
    await offer(stage)
    done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), looked) == (1, ["w0"])
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)


async def test_polls_that_wait_share_what_is_queued(stage: Stage) -> None:
    """A worker with room for all leaves the others theirs."""
    queue = stage.gateway.attempts
    polls = [asyncio.create_task(queue.take(f"w{number}", 9, 10)) for number in range(3)]
    await eventually(lambda: len(queue.workers()) == 3)
    request = SessionRequest(task=TASK, offer_heartbeat_s=60.0)
    for _ in range(6):
        queue.add(stage.gateway._new_session(request, "key", None, None))
    assert [len(await poll) for poll in polls] == [2, 2, 2]


async def test_the_attempts_of_a_trainers_own_agents_are_not_given_to_workers(
    stage: Stage, worker: Attempts
) -> None:
    own, other = await offer(stage, offer_heartbeat_s=0.0), await offer(stage)
    assert [row["attempt"] for row in await worker.next(9)] == [other]
    body = {"worker": "agent-1", "capacity": 9, "wait_s": 0}
    answer = await worker.post("/attempts/next", stage.client.agents_key, body)
    assert [row["attempt"] for row in answer["attempts"]] == [own]
    assert stage.client.agents_key not in (WORKER_KEY, "admin")


async def test_an_attempt_without_heartbeats_is_not_lost(
    stage: Stage, worker: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await offer(stage, offer_heartbeat_s=0.0)
    body = {"worker": "agent-1", "capacity": 9, "wait_s": 0}
    [attempt] = (await worker.post("/attempts/next", stage.client.agents_key, body))["attempts"]
    later = asyncio.get_running_loop().time() + 19.0
    stage.gateway.attempts.expire(later)
    await talk(attempt)
    await worker.finish(attempt, output="3")
    assert (await result_of(stage, session_id)).outcome is Outcome.COMPLETED


async def test_a_waiting_poll_is_told_at_once_of_attempts_that_ended(stage: Stage, worker: Attempts) -> None:
    session_id = await offer(stage, group_id="g1", slot=0)
    [attempt] = await worker.next()
    body = {"worker": worker.name, "capacity": 1, "wait_s": 30}
    waiting = asyncio.create_task(worker.post("/attempts/next", WORKER_KEY, body))
    await eventually(lambda: stage.gateway.attempts.workers()[0]["connected"])
    await asyncio.sleep(0.05)
    await stage.client.drop_group("g1")
    async with asyncio.timeout(5):
        assert await waiting == {"attempts": [], "ended": [session_id], "shards": 1}
    assert attempt["attempt"] == session_id


async def test_an_attempt_may_be_reported_a_little_after_its_deadline(stage: Stage, worker: Attempts) -> None:
    session_id = await offer(stage, deadline_s=0.1)
    [attempt] = await worker.next()
    await asyncio.sleep(0.2)
    await worker.finish(attempt, outcome="timeout", error="it hung in a loop")
    summary = await result_of(stage, session_id)
    assert (summary.outcome, summary.error) == (Outcome.TIMEOUT, "it hung in a loop")


async def test_no_attempt_is_given_to_two_workers(stage: Stage) -> None:
    """Many workers poll at random, and some disconnect in mid-poll; every attempt is run once."""
    rng = random.Random(3)
    taken: list[str] = []
    total = 80

    async def work(name: str) -> None:
        async with Attempts(stage.url, name) as worker:
            while len(taken) < total:
                poll = asyncio.create_task(worker.next(rng.randint(1, 5), wait_s=rng.choice([0.02, 0.5])))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.03)
                    poll.cancel()
                ended = (await asyncio.gather(poll, return_exceptions=True))[0]
                for attempt in ended if isinstance(ended, list) else []:
                    taken.append(attempt["attempt"])

    opened: list[str] = []

    async def open_all() -> None:
        for number in range(total):
            opened.append(await offer(stage, offer_heartbeat_s=SOON_S, group_id=f"g{number}", slot=0))
            await asyncio.sleep(rng.random() * 0.01)

    async def run_lost_again() -> None:
        """What was sent to a worker that disconnected just then is lost, and opened again."""
        while len(taken) < total:
            await asyncio.sleep(0.05)
            for session in stage.gateway.sessions.all():
                lost = session.ending is not None and session.id not in taken and session.id in opened
                if lost:
                    opened.remove(session.id)
                    opened.append(await offer(stage, offer_heartbeat_s=60.0))

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(open_all())
        group.create_task(run_lost_again())
        for number in range(6):
            group.create_task(work(f"w{number}"))
    assert len(taken) == len(set(taken)) == total


async def test_an_attempt_of_a_poll_that_was_broken_off_is_the_next_one_given(
    stage: Stage, worker: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = asyncio.Event()
    real = stage.gateway.journal.offered

    async def slow(sessions: Any) -> None:
        await written.wait()
        await real(sessions)

    monkeypatch.setattr(stage.gateway.journal, "offered", slow)
    first, second = await offer(stage), await offer(stage)
    poll = asyncio.create_task(worker.next())
    await eventually(lambda: stage.gateway.attempts.queued == 1)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    await eventually(lambda: stage.gateway.attempts.queued == 2)
    written.set()
    assert [row["attempt"] for row in await worker.next(5)] == [first, second]


async def test_attempts_of_a_worker_that_leaves_end_cancelled(stage: Stage, worker: Attempts) -> None:
    taken, kept = await offer(stage), await offer(stage)
    await worker.next()
    async with Attempts(stage.url, "w2") as other:
        [attempt] = await other.next()
        assert await worker.leave() == 1
        assert await worker.leave() == 0
        summary = await result_of(stage, taken)
        assert (summary.outcome, summary.error) == (Outcome.CANCELLED, "worker w1 ended")
        await other.finish(attempt, outcome="agent_error")
        assert (await result_of(stage, kept)).outcome is Outcome.AGENT_ERROR


async def test_a_poll_of_a_worker_that_left_takes_no_attempt(stage: Stage, worker: Attempts) -> None:
    poll = asyncio.create_task(worker.next(wait_s=10))
    await eventually(lambda: any(row["connected"] for row in stage.gateway.attempts.workers()))
    await worker.leave()
    session_id = await offer(stage)
    assert await poll == []
    async with Attempts(stage.url, "w2") as other:
        assert [row["attempt"] for row in await other.next()] == [session_id]


async def test_a_journal_that_cannot_be_written_keeps_the_attempt_queued(
    stage: Stage, worker: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidegate.errors import GatewayError

    async def broken(_: Any) -> None:
        raise GatewayError("disk full", status=503)

    session_id = await offer(stage)
    with monkeypatch.context() as patch:
        patch.setattr(stage.gateway.journal, "offered", broken)
        with pytest.raises(Refused, match="disk full"):
            await worker.next()
    assert [row["attempt"] for row in await worker.next()] == [session_id]


async def result_of(stage: Stage, session_id: str) -> SessionSummary:
    async with asyncio.timeout(10):
        return await stage.client.result(session_id)


async def test_the_attempts_of_a_silent_worker_are_lost_and_its_late_finish_is_refused(
    stage: Stage, worker: Attempts
) -> None:
    session_id = await offer(stage, offer_heartbeat_s=SOON_S)
    [attempt] = await worker.next()
    await talk(attempt)
    summary = await result_of(stage, session_id)
    assert summary.outcome is Outcome.INFRA_ERROR
    assert str(summary.error).startswith("worker w1 sent no heartbeat for ")
    assert summary.reward is None
    assert summary.turns == 1, "what was sampled is recorded"
    for call in (worker.finish(attempt, output="3"), worker.heartbeat(attempt)):
        with pytest.raises(Refused, match="sent no heartbeat") as refused:
            await call
        assert refused.value.status == 410
    assert (await stage.client.result(session_id)).outcome is Outcome.INFRA_ERROR
    with pytest.raises(Refused):
        await talk_refused(attempt)
    assert await worker.next(wait_s=0) == [], "the worker goes on"


async def talk_refused(attempt: dict[str, Any]) -> None:
    import openai

    try:
        await talk(attempt)
    except openai.PermissionDeniedError as error:
        raise Refused(str(error), 403) from None


async def test_heartbeats_keep_an_attempt_until_its_deadline_and_no_longer(
    stage: Stage, worker: Attempts
) -> None:
    session_id = await offer(stage, offer_heartbeat_s=SOON_S, deadline_s=3 * LOST_AFTER * SOON_S)
    [attempt] = await worker.next()

    async def beat() -> None:
        while True:
            await worker.heartbeat(attempt)
            await asyncio.sleep(SOON_S / 3)

    with pytest.raises(Refused, match="deadline passed") as refused:
        await beat()
    assert refused.value.status == 410
    summary = await result_of(stage, session_id)
    assert summary.outcome is Outcome.TIMEOUT
    assert summary.seconds >= 3 * LOST_AFTER * SOON_S


async def test_the_deadline_starts_when_a_worker_takes_the_attempt(stage: Stage, worker: Attempts) -> None:
    session_id = await offer(stage, deadline_s=0.5, limits={"seconds": 0.5})
    await asyncio.sleep(1.6)  # longer than the deadline, and a sweep
    [attempt] = await worker.next()
    await talk(attempt)
    await worker.finish(attempt, output="3")
    summary = await result_of(stage, session_id)
    assert summary.outcome is Outcome.COMPLETED
    assert summary.seconds < 0.5


async def test_a_worker_that_takes_twice_runs_two_attempts(stage: Stage, worker: Attempts) -> None:
    opened = {await offer(stage), await offer(stage)}
    polls = await asyncio.gather(worker.next(), worker.next())
    assert {attempt["attempt"] for [attempt] in polls} == opened
    async with Attempts(stage.url, "w2") as other:
        with pytest.raises(Refused, match="not run by worker w2"):
            await other.heartbeat(polls[0][0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"worker": "w1", "capacity": 10**9}, "capacity = 1000000000: .*1024"),
        ({"worker": "w1", "capacity": 0}, "capacity = 0: .*1"),
        ({"worker": "", "capacity": 1}, "worker = '': "),
        ({"worker": "w1", "wait_s": 3600}, "wait_s = 3600: .*60"),
        ({"worker": "w1", "more": 1}, "more: "),
        ([], "object"),
    ],
)
async def test_a_poll_is_bounded(worker: Attempts, body: Any, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        await worker.post("/attempts/next", WORKER_KEY, body)
    assert refused.value.status == 400


async def test_a_worker_reports_failures_and_cancellations_but_no_success(
    stage: Stage, worker: Attempts
) -> None:
    for outcome in ("agent_error", "infra_error", "timeout", "cancelled"):
        session_id = await offer(stage)
        [attempt] = await worker.next()
        await worker.finish(attempt, outcome=outcome, error="why")
        summary = await result_of(stage, session_id)
        assert (summary.outcome.value, summary.error, summary.reward) == (outcome, "why", None)
    await offer(stage)
    [attempt] = await worker.next()
    for outcome in ("completed", "truncated", "reward_error", "other"):
        with pytest.raises(Refused, match="outcome = ") as refused:
            await worker.finish(attempt, outcome=outcome)
        assert refused.value.status == 400
    with pytest.raises(Refused, match="trainer_epoch"):
        await worker.finish(attempt, trainer_epoch=9)


async def test_an_unexpected_failure_of_a_route_is_answered_in_json_and_logged(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage.gateway.sessions, "all", Mock(side_effect=KeyError("planted")))
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer admin"}) as http:
        response = await http.get(f"{stage.url}/sessions")
        assert response.status == 500
        message = (await response.json())["error"]["message"]
    assert message == "GET /sessions failed with KeyError; the gateway's log has it"
    assert "planted" in caplog.text


def control_routes(stage: Stage) -> list[tuple[str, str]]:
    """Method and path of each control route, from the OpenAPI document."""
    from starlette.testclient import TestClient

    paths = TestClient(create_app(stage.gateway)).get("/openapi.json").json()["paths"]
    return [
        (method, path.replace("{session_id}", "x").replace("{group_id}", "g").replace("{attempt}", "x"))
        for path, operations in paths.items()
        for method in operations
        if not path.startswith(("/v1/", "/s/")) and path not in ("/health", "/ready")
    ]


async def test_each_key_opens_its_own_routes_only(stage: Stage, worker: Attempts) -> None:
    await offer(stage)
    [attempt] = await worker.next()
    other = await offer(stage)
    async with aiohttp.ClientSession() as http:

        async def status(method: str, path: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.request(method, stage.url + path, headers=headers, json={}) as response:
                return response.status

        routes = await asyncio.to_thread(control_routes, stage)
        assert ("get", "/attempts") in routes
        for method, path in routes:
            if not path.startswith("/attempts/"):
                assert await status(method, path, WORKER_KEY) == 401, path
            assert await status(method, path, attempt["api_key"]) == 401, path
        data = f"/s/{attempt['attempt']}/v1/chat/completions"
        assert await status("post", data, WORKER_KEY) == 401
        assert await status("post", f"/s/{attempt['attempt']}/finish", WORKER_KEY) == 401
        assert await status("post", f"/s/{other}/finish", attempt["api_key"]) == 401
        for key in ("admin", attempt["api_key"], "", "wrong"):
            assert await status("post", "/attempts/next", key) == 401
            assert await status("post", f"/attempts/{other}/heartbeat", key) == 401


async def test_the_key_of_a_program_cannot_decide_its_outcome(stage: Stage, worker: Attempts) -> None:
    await offer(stage)
    [attempt] = await worker.next()
    await talk(attempt)
    for outcome in (None, "infra_error", "cancelled", "timeout", "agent_error"):
        with pytest.raises(Refused, match="send the finish_key that came with it") as refused:
            await worker.finish({**attempt, "finish_key": attempt["api_key"]}, outcome=outcome)
        assert refused.value.status == 403
    assert (await worker.finish(attempt, output="3"))["outcome"] == "completed"


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ({"output": "x" * (MAX_OUTPUT + 1)}, "output"),
        ({"metrics": {str(number): 1.0 for number in range(MAX_METRICS + 1)}}, "metrics"),
        ({"metrics": {"x" * (MAX_METRICS + 1): 1.0}}, "metrics"),
    ],
    ids=["output", "metrics", "name of a metric"],
)
async def test_a_report_is_bounded(
    stage: Stage, worker: Attempts, report: dict[str, Any], named: str
) -> None:
    await offer(stage)
    [attempt] = await worker.next()
    await talk(attempt)
    with pytest.raises(Refused, match=named) as refused:
        await worker.finish(attempt, **report)
    assert refused.value.status == 400
    answer = await worker.finish(attempt, reward=["x" * 2_000_000], error="y" * 2_000_000)
    assert (answer["outcome"], len(answer["error"]) <= MAX_ERROR) == ("reward_error", True)


@pytest.mark.parametrize("report", [{"reward": 10**400}, {"reward": 1, "metrics": {"a": 10**400}}])
async def test_a_number_beyond_a_float_is_no_failure_of_the_gateway(
    stage: Stage, worker: Attempts, report: dict[str, Any]
) -> None:
    await offer(stage)
    [attempt] = await worker.next()
    await talk(attempt)
    outcome = (await worker.finish(attempt, output="3", **report))["outcome"]
    assert outcome == ("reward_error" if report["reward"] != 1 else "completed")


async def test_a_session_that_is_not_offered_is_not_finished_by_its_agent(
    stage: Stage, worker: Attempts
) -> None:
    access = await stage.client.open_session(task=TASK)
    with pytest.raises(Refused, match="finished by the process that opened it") as refused:
        await worker.finish({"attempt": access.session_id, "finish_key": access.api_key}, output="3")
    assert refused.value.status == 403


async def test_the_key_that_opened_an_attempt_is_void_once_it_is_taken(
    stage: Stage, worker: Attempts
) -> None:
    access = await stage.client.open_session(task=TASK, offer_heartbeat_s=60.0)
    [attempt] = await worker.next()
    assert attempt["api_key"] != access.api_key
    with pytest.raises(Refused) as refused:
        await worker.finish({**attempt, "finish_key": access.api_key})
    assert refused.value.status == 401


async def test_no_worker_acts_in_the_name_of_another(stage: Stage, worker: Attempts) -> None:
    await offer(stage)
    first = {"worker": "first", "secret": "s1", "capacity": 1, "wait_s": 5}
    [attempt] = (await worker.post("/attempts/next", WORKER_KEY, first))["attempts"]
    own = {"worker": "local", "capacity": 1, "wait_s": 0}
    await worker.post("/attempts/next", agents_key("admin"), own)
    for name, body in (("leave", {}), ("next", {"wait_s": 0}), (f"{attempt['attempt']}/heartbeat", {})):
        for known in ("first", "local"):
            for secret in ({}, {"secret": "s2"}):
                with pytest.raises(Refused, match="is another process") as refused:
                    await worker.post(f"/attempts/{name}", WORKER_KEY, {"worker": known, **secret, **body})
                assert refused.value.status == 403
    await talk(attempt)
    assert (await worker.finish(attempt, output="3"))["outcome"] == "completed"
    left = await worker.post("/attempts/leave", WORKER_KEY, {"worker": "first", "secret": "s1"})
    assert left == {"ended": 0, "returned": 1}


async def test_a_gateway_without_a_worker_key_takes_no_workers(tmp_path: Path) -> None:
    async with staged(make_model_dir(tmp_path / "tiny")) as stage, Attempts(stage.url) as worker:
        with pytest.raises(Refused, match="no worker key") as refused:
            await worker.next()
        assert refused.value.status == 403


async def test_the_attempts_of_a_replaced_trainer_end_and_workers_are_told(
    stage: Stage, worker: Attempts
) -> None:
    queued_later = [await offer(stage, epoch=1) for _ in range(2)]
    [attempt] = await worker.next()
    await stage.client.begin_epoch(2)
    for call in (worker.heartbeat(attempt), worker.finish(attempt, output="3")):
        with pytest.raises(Refused, match="epoch 1") as refused:
            await call
        assert refused.value.status == 410
    for session_id in queued_later:
        assert (await result_of(stage, session_id)).outcome is Outcome.CANCELLED
    new = await offer(stage, epoch=2)
    assert [row["attempt"] for row in await worker.next(9)] == [new], "no ended one is given"


async def test_attempts_of_a_dropped_group_are_not_given(stage: Stage, worker: Attempts) -> None:
    running = await offer(stage, group_id="g1", slot=0)
    [attempt] = await worker.next()
    await offer(stage, group_id="g1", slot=1)
    waiting = asyncio.create_task(stage.client.result(running))
    await asyncio.sleep(0.05)
    await stage.client.drop_group("g1")
    assert await worker.next(wait_s=0.1) == []
    with pytest.raises(Refused, match="ended and deleted") as refused:
        await worker.heartbeat(attempt)
    assert refused.value.status == 410
    with pytest.raises(Exception, match="there is no session"):
        await waiting


async def test_the_admin_sees_queue_and_workers(stage: Stage, worker: Attempts) -> None:
    await worker.next(wait_s=0)
    for _ in range(3):
        await offer(stage)
    await worker.next(2)
    listed = await stage.client.attempts()
    assert listed["queued"] == 1
    [row] = listed["workers"]
    assert (row["worker"], row["running"], row["connected"]) == ("w1", 2, True)
    assert row["seen_s"] < 5
    metrics = await stage.client.metrics()
    assert "tidegate_gateway_attempts_queued 1" in metrics
    assert "tidegate_gateway_workers 1" in metrics


async def test_an_offer_needs_a_task(stage: Stage) -> None:
    with pytest.raises(Exception, match="needs a task"):
        await stage.client.open_session(offer_heartbeat_s=1.0)
