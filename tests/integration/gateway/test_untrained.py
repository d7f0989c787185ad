"""Turns that are recorded and not trained on, and requests for JSON in training sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.fakes import Stage, staged
from tests.integration.gateway.sdk_stage import TASK, finished, opened, stage
from tests.integration.gateway.test_journal import killed
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.base import Session
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.engines.protocol import GenerateResult, trainable_tokens
from tidegate.trainer.batch.rows import rows_of
from tidegate.viewer.dashboard.episode import may_train, reasons

__all__ = ["stage"]
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
TITLE: list[Any] = [{"role": "user", "content": "a title, please"}]
NO = {"x-tidegate-train": "no"}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": TITLE},
    "completions": {"prompt": "a title"},
    "responses": {"input": "a title"},
    "messages": {"messages": TITLE, "max_tokens": 99},
}


async def post(access: SessionAccess, path: str, body: dict[str, Any], **headers: str) -> int:
    told = {"Authorization": f"Bearer {access.api_key}", **headers}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{access.base_url}/{path}", json={"model": "m", **body}, headers=told) as response,
    ):
        await response.read()
        return response.status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_header_exempts_a_call(stage: Stage, path: str, stream: bool) -> None:
    access, llm = await opened(stage)
    await llm.chat.completions.create(model="m", messages=ASK)
    assert await post(access, path, {**BODIES[path], "stream": stream}, **NO) == 200
    trajectory = await finished(stage, access)
    main, title = trajectory.turns
    assert (main.exempt, title.exempt) == (None, "header x-tidegate-train: no")
    assert (title.delivered, title.trainable) == (True, False)
    [row] = rows_of(trajectory, 1.0)
    assert row.trained == len(main.output_ids)
    assert trajectory.messages[0] == ASK[0], "rewards read the main conversation"


async def test_a_model_name_exempts_a_call_and_a_header_overrules_it(stage: Stage) -> None:
    access, _ = await opened(stage, untrained_models=["title"])
    for headers in ({}, {"x-tidegate-train": "yes"}):
        await post(access, "chat/completions", {"messages": TITLE, "model": "title"}, **headers)
    await post(access, "chat/completions", {"messages": ASK})
    trajectory = await finished(stage, access)
    assert [turn.exempt for turn in trajectory.turns] == ["model name 'title'", None, None]


async def test_another_value_of_the_header_is_refused_by_name(stage: Stage) -> None:
    _, llm = await opened(stage)
    with pytest.raises(openai.BadRequestError, match="x-tidegate-train: 'maybe' is neither yes nor no"):
        await llm.chat.completions.create(
            model="m", messages=ASK, extra_headers={"x-tidegate-train": "maybe"}
        )


async def test_an_agents_client_for_auxiliary_calls(stage: Stage) -> None:
    access, _ = await opened(stage)
    session = Session(access.base_url, access.api_key, "m", None, 1e9)
    await session.openai().chat.completions.create(model="m", messages=ASK)
    await session.openai(train=False).chat.completions.create(model="m", messages=TITLE)
    trajectory = await finished(stage, access)
    assert [turn.trainable for turn in trajectory.turns] == [True, False]


async def test_an_exempt_turn_makes_no_group_stale_and_no_episode_truncated(stage: Stage) -> None:
    access, llm = await opened(stage)
    await llm.chat.completions.create(model="m", messages=TITLE, max_tokens=1, extra_headers=NO)
    stage.engine.version = "3"
    await llm.chat.completions.create(model="m", messages=ASK)
    await llm.chat.completions.create(model="m", messages=TITLE, max_tokens=1, extra_headers=NO)
    trajectory = await finished(stage, access)
    assert trajectory.turns[-1].finish_reason == "length"
    assert (trajectory.outcome, trajectory.oldest_version()) == ("completed", 3)


async def test_an_episode_of_exempt_calls_alone_says_why(stage: Stage) -> None:
    access, llm = await opened(stage)
    await llm.chat.completions.create(model="m", messages=ASK, extra_headers=NO)
    summary = await stage.client.finish(access.session_id, reward=1)
    assert (summary.outcome, summary.reward) == ("agent_error", None)
    assert "every call of the agent is exempt from training" in str(summary.error)


def test_the_view_says_that_it_is_exempt() -> None:
    turn = {"output_ids": [1, 2], "delivered": True, "exempt": "model name 'title'"}
    assert reasons(turn, "trained") == [("exempt", 2)]
    assert not may_train(turn)


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ],
)
async def test_a_request_for_json_is_sampled_freely_and_says_so(
    stage: Stage, path: str, form: dict[str, Any]
) -> None:
    access, _ = await opened(stage)
    stage.say("this is no JSON")
    assert await post(access, path, {**BODIES[path], **form}) == 200
    assert "json_schema" not in stage.engine.requests[0]["sampling_params"]
    trajectory = await finished(stage, access)
    [turn] = trajectory.turns
    assert (turn.structured, turn.output_mask) == ("text", None)
    assert (trajectory.outcome, rows_of(trajectory, 1.0)[0].trained) == ("completed", len(turn.output_ids))


@pytest.fixture
async def strict(tmp_path: Path) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    options: dict[str, Any] = {"structured_output": "grammar", "journal": tmp_path / "journal"}
    async with staged(model, untrained_models=["title"], **options) as made:
        yield made


async def test_under_a_grammar_nothing_is_trained_on_that_the_engine_does_not_attest(strict: Stage) -> None:
    access, _ = await opened(strict)
    body = {**BODIES["chat/completions"], "response_format": {"type": "json_object"}}
    assert await post(access, "chat/completions", body) == 200
    assert strict.engine.requests[0]["sampling_params"]["json_schema"] == '{"type":"object"}'
    trajectory = await finished(strict, access)
    [turn] = trajectory.turns
    assert turn.structured == "grammar"
    assert turn.output_mask is not None
    assert not turn.output_mask.any()
    assert rows_of(trajectory, 1.0) == []


async def test_the_record_outlives_the_gateway(strict: Stage, tmp_path: Path) -> None:
    access = await strict.client.open_session(task=TASK)
    await post(access, "chat/completions", {"messages": ASK, "response_format": {"type": "json_object"}})
    await post(access, "chat/completions", {"messages": TITLE, "model": "title"})
    async with staged(tmp_path / "tiny", journal=killed(tmp_path)) as later:
        session = later.gateway.session(access.session_id)
        assert [turn.structured for turn in session.tree.turns()] == ["grammar", None]
        assert [turn.exempt for turn in session.tree.turns()] == [None, "model name 'title'"]
        assert session.untrained_models == ("title",)


def test_a_token_is_trained_on_where_the_grammar_took_nothing_from_it() -> None:
    sampled = GenerateResult(ids=[1, 2, 3], masses=[1.0, 0.99995, 0.99])
    assert trainable_tokens(sampled).tolist() == [1, 1, 0]
    assert trainable_tokens(GenerateResult(ids=[1, 2])).tolist() == [0, 0]
