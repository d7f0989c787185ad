"""The judge: a second model over the real SDK; verdicts are cached, failures are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests import REPO
from tests.scripted_llm import Reply, scripted_llm
from tidegate.envs.search.judge import Judge
from tidegate.envs.search.search_qa import SearchQA
from tidegate.errors import ConfigError, RewardError
from tidegate.types import Task

DATA = str(REPO / "examples/small_agents/held_out.jsonl")
TASK = Task("t", "search_qa", [{"role": "user", "content": "Who?"}], ["Barack Obama", "Obama"])


async def judged(reply: Callable[[Any], Reply], *said: str, **options: Any) -> tuple[list[Any], list[Any]]:
    """The verdicts (or errors) on some answers at the same time, and the requests."""
    async with scripted_llm(reply) as (url, requests):
        environment = SearchQA(DATA, DATA, metric="judge", judge={"url": url, "model": "judge", **options})

        def score(one: str) -> float:
            return environment.score(TASK, None, f"<answer>{one}</answer>", []).reward

        results = await asyncio.gather(
            *(asyncio.to_thread(score, one) for one in said), return_exceptions=True
        )
        return list(results), requests


def says(text: str) -> Callable[[Any], Reply]:
    return lambda _: {"content": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is he.\ncorrect: yes", 1.0),
        ("He is another.\n**Correct:** No.", 0.0),
        ('It says "correct: yes", which is wrong.\ncorrect: no', 0.0),
    ],
)
async def test_the_last_verdict_counts(text: str, value: float) -> None:
    results, requests = await judged(says(text), "the 44th president")
    assert results == [value]
    assert requests[0]["model"] == "judge"
    for part in ("Who?", "Barack Obama; Obama", "the 44th president"):
        assert part in requests[0]["messages"][0]["content"]


async def test_the_same_answer_is_judged_once_also_at_the_same_time() -> None:
    results, requests = await judged(says("correct: yes"), *["he"] * 8, "she")
    assert results == [1.0] * 9
    assert len(requests) == 2


async def test_no_answer_is_wrong_without_being_judged() -> None:
    async with scripted_llm(says("correct: yes")) as (url, requests):
        environment = SearchQA(DATA, DATA, metric="judge", judge={"url": url, "model": "judge"})
        scored = await asyncio.to_thread(environment.score, TASK, None, "no tags", [])
        assert (scored.reward, scored.metrics["unparseable"], requests) == (0.0, 1.0, [])


async def test_a_judge_without_a_verdict_is_a_reward_error_and_asked_again_next_time() -> None:
    results, requests = await judged(says("maybe"), "he", attempts=2)
    assert isinstance(results[0], RewardError)
    assert "no verdict in 2 attempts: no verdict in 'maybe'" in str(results[0])
    assert len(requests) == 2
    replies = iter(["maybe", "correct: yes"])
    async with scripted_llm(lambda _: {"content": next(replies)}) as (url, _):
        judge = Judge(url, "judge", attempts=1)
        with pytest.raises(RewardError):
            await asyncio.to_thread(judge.verdict, "Who?", ["Obama"], "he")
        assert await asyncio.to_thread(judge.verdict, "Who?", ["Obama"], "he") == 1.0


def test_a_judge_that_cannot_be_reached_is_a_reward_error() -> None:
    judge = Judge("http://127.0.0.1:9/v1", "judge", attempts=2)
    with pytest.raises(RewardError, match="in 2 attempts: APIConnectionError"):
        judge.verdict("Who?", ["Obama"], "he")


async def test_a_silent_judge_is_given_up() -> None:
    end = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await end.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        judge = Judge(f"http://127.0.0.1:{port}/v1", "judge", timeout_s=0.2, attempts=1)
        with pytest.raises(RewardError, match="APITimeoutError"):
            await asyncio.to_thread(judge.verdict, "Who?", ["Obama"], "he")
        end.set()


def test_its_key_is_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="'JUDGE_KEY', but that variable is not set"):
        Judge("http://127.0.0.1:9/v1", "judge", api_key_env="JUDGE_KEY")
