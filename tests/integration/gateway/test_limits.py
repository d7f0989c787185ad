"""Limits of sessions and of queues, and secrets that logs and errors must not contain."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import Fault, Stage, eventually, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import GatewayError
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.engines.engine import PoolOptions
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.turns import request_reader
from tidegate.types import Outcome, Task

TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer="3")
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    pool = PoolOptions(probe_every_s=0.1, engine_calls=1, waiting_calls=1)
    async with staged(make_model_dir(tmp_path / "tiny"), pool=pool) as made:
        yield made


async def opened(stage: Stage, retries: int = 3, **options: Any) -> tuple[SessionAccess, AsyncOpenAI]:
    access = await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options})
    return access, await stage.llm(access, max_retries=retries)


async def ask(llm: AsyncOpenAI, **options: Any) -> Any:
    return (await llm.chat.completions.create(model="m", messages=ASK, **options)).choices[0]


# -- budgets


@pytest.mark.parametrize(
    ("limits", "why"),
    [({"turns": 2}, "turns: 2 of 2"), ({"tokens": 10}, "tokens: 10 of 10")],
    ids=["turns", "tokens"],
)
async def test_a_budget_that_is_used_up_ends_the_sampling_and_truncates(
    stage: Stage, limits: dict[str, float], why: str
) -> None:
    access, llm = await opened(stage, limits=limits)
    for _ in range(2):
        stage.engine.replies.append([40] * 6)
        await ask(llm)
    with pytest.raises(openai.PermissionDeniedError, match=why) as raised:
        await ask(llm)
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert raised.value.code == "budget_exceeded"
    assert len(stage.engine.requests) == 2, "refused calls cost nothing, and are not retried"
    summary = await stage.client.finish(access.session_id, outcome="agent_error", error=None, reward=0.5)
    assert (summary.outcome, summary.reward, summary.turns) == (Outcome.TRUNCATED, 0.5, 2)
    assert why in str(summary.error)


async def test_the_last_turn_of_a_token_budget_is_cut_at_it(stage: Stage) -> None:
    access, llm = await opened(stage, limits={"tokens": 10})
    stage.engine.replies.extend([[40] * 6, [40] * 6])
    await ask(llm)
    choice = await ask(llm, max_tokens=50)
    assert choice.finish_reason == "length"
    assert [one["sampling_params"]["max_new_tokens"] for one in stage.engine.requests] == [10, 4]
    assert (await stage.client.finish(access.session_id, reward=1)).sampled_tokens == 10


async def test_seconds_end_the_sampling_before_the_deadline_does(stage: Stage) -> None:
    access, llm = await opened(stage, limits={"seconds": 5})
    await ask(llm)
    stage.gateway.session(access.session_id).opened -= 6
    with pytest.raises(openai.PermissionDeniedError, match="seconds: 6 of 5"):
        await ask(llm)
    assert (await stage.client.finish(access.session_id, reward=1)).outcome is Outcome.TRUNCATED


async def test_an_agent_that_stays_within_its_budget_completes(stage: Stage) -> None:
    access, llm = await opened(stage, limits={"turns": 1, "tokens": 999, "seconds": 20, "calls": 1})
    await ask(llm)
    assert (await stage.client.finish(access.session_id, reward=1)).outcome is Outcome.COMPLETED


async def test_a_call_above_the_concurrency_limit_succeeds_later(stage: Stage) -> None:
    access, llm = await opened(stage, retries=0, limits={"calls": 1})
    stage.engine.faults.append(Fault("hold"))
    first = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    with pytest.raises(openai.RateLimitError, match="1 calls in progress") as raised:
        await ask(llm)
    assert "x-should-retry" not in raised.value.response.headers
    stage.engine.release()
    await first
    await ask(llm)
    assert (await stage.client.finish(access.session_id, reward=1)).outcome is Outcome.COMPLETED


async def test_parallel_calls_count_as_the_turns_that_they_become(stage: Stage) -> None:
    _, llm = await opened(stage, limits={"turns": 1})
    stage.engine.faults.append(Fault("hold"))
    first = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    with pytest.raises(openai.PermissionDeniedError, match="turns: 1 of 1"):
        await ask(llm)
    stage.engine.release()
    await first


async def test_a_sessions_own_limits_go_over_the_gateways(tmp_path: Path) -> None:
    limits = SessionLimits(turns=1, calls=3)
    async with staged(make_model_dir(tmp_path / "tiny"), limits=limits) as stage:
        shown = []
        for own in ({}, {"turns": 2, "tokens": 9}):
            access, _ = await opened(stage, limits=own)
            headers = {"Authorization": "Bearer admin"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.get(f"{stage.url}/sessions/{access.session_id}") as response,
            ):
                shown.append((await response.json())["limits"])
        unlimited = {"seconds": None, "tool_calls": None}
        assert shown[0] == {"turns": 1, "tokens": None, "calls": 3, **unlimited}
        assert shown[1] == {"turns": 2, "tokens": 9, "calls": 3, **unlimited}
        with pytest.raises(GatewayError, match="rounds"):
            await opened(stage, limits={"rounds": 2})
        with pytest.raises(GatewayError, match="turns"):
            await opened(stage, limits={"turns": 0})


# -- bounded lines and bodies


async def test_a_full_queue_refuses_a_call_with_a_status_that_sdks_retry(stage: Stage) -> None:
    """One call on the engine, one in the line: the third is told why, and its SDK may try again."""
    sessions = [await opened(stage, retries=0) for _ in range(3)]
    stage.engine.faults.append(Fault("hold"))
    calls = []
    for number, (_, llm) in enumerate(sessions[:2]):
        calls.append(asyncio.create_task(ask(llm)))
        if number == 0:
            await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    await eventually(lambda: stage.gateway.pool.waiting == 1)
    access, llm = sessions[2]
    with pytest.raises(openai.InternalServerError, match="1 calls wait") as raised:
        await ask(llm)
    assert (raised.value.status_code, raised.value.code) == (503, "queue_full")
    assert "x-should-retry" not in raised.value.response.headers
    patient = llm.with_options(max_retries=8)
    third = asyncio.create_task(ask(patient))
    stage.engine.release()
    await asyncio.gather(*calls, third)
    assert (await stage.client.finish(access.session_id, reward=1)).outcome is Outcome.COMPLETED


async def test_an_agent_that_failed_on_a_full_queue_timed_out_on_slow_engines(stage: Stage) -> None:
    sessions = [await opened(stage, retries=0) for _ in range(3)]
    stage.engine.faults.append(Fault("hold"))
    calls = [asyncio.create_task(ask(sessions[0][1]))]
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    calls.append(asyncio.create_task(ask(sessions[1][1])))
    await eventually(lambda: stage.gateway.pool.waiting == 1)
    access, llm = sessions[2]
    with pytest.raises(openai.InternalServerError):
        await ask(llm)
    summary = await stage.client.finish(access.session_id, outcome="agent_error")
    assert (summary.outcome, summary.reward) == (Outcome.TIMEOUT, None)
    stage.engine.release()
    await asyncio.gather(*calls)


async def test_one_session_with_many_calls_does_not_starve_the_others(stage: Stage, tmp_path: Path) -> None:
    async with staged(make_model_dir(tmp_path / "other"), pool=PoolOptions(engine_calls=2)) as fair:
        _, greedy = await opened(fair, seed=1)
        others = [(await opened(fair, seed=number))[1] for number in (2, 3)]
        fair.engine.faults.extend([Fault("hold"), Fault("hold")])
        calls = [asyncio.create_task(ask(greedy, max_tokens=11)) for _ in range(30)]
        await eventually(lambda: fair.gateway.pool.waiting == 28)
        late = [asyncio.create_task(ask(llm, max_tokens=22)) for llm in others]
        await eventually(lambda: fair.gateway.pool.waiting == 30)
        fair.engine.release()
        await asyncio.gather(*calls, *late)
        wished = [one["sampling_params"]["max_new_tokens"] for one in fair.engine.requests]
        served = [number for number, tokens in enumerate(wished) if tokens == 22]
        assert max(served) <= 5, f"two running, then one of each session: {wished}"


@pytest.mark.parametrize("path", ["/s/{session}/v1/chat/completions", "/sessions", "/groups/lease"])
async def test_a_body_that_is_too_large_is_refused(
    stage: Stage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "MAX_BODY", 1000)
    access, _ = await opened(stage)
    key = access.api_key if "v1" in path else "admin"
    url = stage.url + path.format(session=access.session_id)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        for body, status in ((b"[" + b" " * 2000 + b"]", 413), (b"[]", 400)):
            async with http.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                assert response.status == status
                assert "error" in await response.json()


# -- secrets

SECRETS = ("the-answer-0x5ec", "the-info-0x5ec", "admin-key-0x5ec")


async def test_no_answer_and_no_key_in_logs_or_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything that goes wrong here is logged, and answered; nothing of it tells what only rewards see."""

    class Rewarder:
        names = ("exact",)

        def score(self, task: Task, *_: Any) -> Any:
            raise ValueError(f"cannot compare with {task.answer}")

    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    task = Task("t1", "sums", ASK, answer=SECRETS[0], info={"more": SECRETS[1]})
    model = make_model_dir(tmp_path / "tiny")
    options: dict[str, Any] = {"admin_key": SECRETS[2], "rewarders": {"sums": Rewarder()}}
    async with staged(model, pool=PoolOptions(probe_every_s=0.1), **options) as stage:
        access, llm = await opened(stage, retries=0, task=task)
        root = access.base_url.partition("/s/")[0]
        stage.engine.faults.extend([Fault("status", 500), Fault("garbage"), Fault("status", 400)])
        for _ in range(2):
            with pytest.raises(openai.APIError) as raised:
                await ask(llm)
            told.append(str(raised.value))
        await ask(llm)
        async with aiohttp.ClientSession() as http:
            for key in (access.api_key, SECRETS[2], "wrong", None):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                for method, path, body in (
                    ("POST", f"/s/{access.session_id}/v1/chat/completions", "{"),
                    ("POST", "/v1/chat/completions", '{"messages": 1}'),
                    ("POST", "/s/other/v1/chat/completions", "{}"),
                    ("GET", f"/sessions/{access.session_id}", ""),
                    ("GET", "/sessions/none", ""),
                    ("POST", "/sessions", json.dumps({"task": {**task.to_wire(), "id": 1}})),
                    ("POST", "/groups/ack", "{}"),
                    ("GET", "/metrics", ""),
                    ("GET", "/health", ""),
                ):
                    async with http.request(method, root + path, data=body, headers=headers) as response:
                        told.append(f"{response.headers} {await response.text()}")
        # Whoever holds the admin key holds the answers, and reads why a reward failed.
        assert SECRETS[0] in str((await stage.client.finish(access.session_id)).error)
    for secret in (*SECRETS, access.api_key):
        assert secret not in caplog.text
        assert not [one for one in told if secret in one]
    assert caplog.records


# -- what is counted and logged


async def test_what_a_gateway_counts_is_read_by_prometheus(stage: Stage) -> None:
    access, llm = await opened(stage)
    first = await llm.chat.completions.create(model="m", messages=ASK)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    follow: list[Any] = [*ASK, said, {"role": "user", "content": "and?"}]
    await llm.chat.completions.create(model="m", messages=follow)
    stage.gateway.metrics.output_tokens += 12_345_678
    stage.gateway.groups.acked["a text of the trainer's own"] = 3
    families = {one.name: one for one in text_string_to_metric_families(await stage.client.metrics())}
    values = {
        (sample.name.removeprefix("tidegate_gateway_"), *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values[("turns_total",)] == values[("turn_seconds_count",)] == 2
    assert values[("turn_seconds_bucket", "+Inf")] == 2
    assert values[("turn_seconds_bucket", "600.0")] == 2
    assert 0 < values[("turn_seconds_sum",)] < 20
    assert values[("drifted_turns_total",)] == 0
    assert values[("tidegate_cache_hit_ratio",)] == 0
    assert values[("engine_healthy", stage.engine.url)] == values[("engines", "healthy")] == 1
    assert values[("waiting_calls",)] == values[("engine_calls", stage.engine.url)] == 0
    assert values[("groups_acked_total", "other")] == 3
    assert values[("output_tokens_total",)] == stage.gateway.metrics.output_tokens, "no digit is lost"
    assert access.session_id not in str(families)


async def test_the_access_log_has_a_line_a_turn_and_can_be_switched_off(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    access, llm = await opened(stage)
    name = "tidegate.gateway.access"
    for level, lines in (("WARNING", 0), ("INFO", 1), ("INFO", 2)):
        with caplog.at_level(level, name):
            await ask(llm)
        said = [json.loads(record.message) for record in caplog.records if record.name == name]
        assert len(said) == lines
    assert (said[-1]["session"], said[-1]["turn"]) == (access.session_id, 2)
    assert said[-1].keys() >= {"prompt_tokens", "output_tokens", "versions", "seconds", "finish"}
