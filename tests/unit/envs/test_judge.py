"""A judge over HTTP: scores, costs, the cache, retries and failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_judge import Endpoint, graded, judging
from tests.waiting import eventually
from tidegate.envs.judge.cache import ReplyCache, erase_replies
from tidegate.envs.judge.judge import RewardJudge
from tidegate.errors import ConfigError, RewardError, RewardUnavailableError, StorageError
from tidegate.settings.judge import JudgeSettings
from tidegate.types import Outcome, Scored, Split, Task, Trajectory

TASK = Task("t", "e", [{"role": "user", "content": "Say a number."}])


def ended(output: str, split: Split = "train", group: str | None = "g") -> Trajectory:
    return Trajectory("s", "t", "e", split, Outcome.COMPLETED, [], group_id=group, output=output)


def judge_of(endpoint: Endpoint, cache: Path | None = None, **settings: Any) -> RewardJudge:
    return RewardJudge(JudgeSettings.model_validate(endpoint.settings(**settings)), cache)


async def test_the_score_is_added_to_the_environments_own_reward() -> None:
    async with judging() as endpoint:
        judge = judge_of(endpoint, weight=2.0, environment_weight=0.5)
        own = Scored(1.0, {"right": 1.0}, {"em": 1.0}, {0: 0.4}, {"solver": 3.0})
        scored = await judge.score(TASK, ended("0.25"), own)
        await judge.close()
    assert scored.reward == 0.5 * 1.0 + 2.0 * 0.25
    assert scored.parts == {"right": 1.0, "judge": 0.25}
    assert scored.turn_rewards == {0: 0.2}
    assert scored.policy_rewards == {"solver": 0.5 * 3.0 + 2.0 * 0.25}
    seconds = scored.metrics["judge/seconds"]
    assert scored.metrics == {
        "em": 1.0, "judge/environment": 1.4, "judge/calls": 1.0, "judge/cached": 0.0, "judge/errors": 0.0,
        "judge/prompt_tokens": 10.0, "judge/completion_tokens": 3.0, "judge/seconds": seconds,
    }  # fmt: skip
    [request] = endpoint.requests
    assert (request["model"], request["temperature"]) == ("grader", 0)


async def test_criteria_are_parts_and_their_weighted_mean_is_the_score() -> None:
    criteria = {"right": {"rubric": "is right", "weight": 3}, "short": {"rubric": "is short"}}
    async with judging() as endpoint:
        endpoint.reply = lambda _: '{"scores": {"right": 1, "short": 0.2}}'
        judge = judge_of(endpoint, kind="criteria", criteria=criteria)
        scored = await judge.score(TASK, ended("x"), None)
        await judge.close()
    assert judge.names == ["judge", "judge_right", "judge_short"]
    assert scored.parts == {"judge": pytest.approx(0.8), "judge_right": 1.0, "judge_short": 0.2}


async def test_evaluations_have_the_environments_own_reward_if_there_is_one() -> None:
    async with judging() as endpoint:
        judge = judge_of(endpoint, environment_weight=0)
        own = Scored(0.75, {"right": 0.75})
        assert await judge.score(TASK, ended("0.1", "eval", None), own) == own
        assert not endpoint.requests
        assert (await judge.score(TASK, ended("0.1", "eval", None), None)).reward == 0.1
        await judge.close()


async def test_a_ranking_compares_distinct_attempts_in_one_call() -> None:
    async with judging() as endpoint:
        judge = judge_of(endpoint, kind="ranking", weight=2.0)
        episodes = [ended("0.2"), ended("0.9"), ended("0.2"), ended("0.4")]
        first = await judge.score(TASK, episodes[0], Scored(1.0, {"right": 1.0}))
        assert (first.reward, first.parts) == (1.0, {"right": 1.0}), "the group is judged later"
        assert not endpoint.requests
        scored = await judge.rank(TASK, episodes)
        assert [one.parts["judge"] for one in scored] == [0.2, 0.9, 0.2, 0.4]
        assert [one.reward for one in scored] == [0.4, 1.8, 0.4, 0.8]
        assert [one.metrics.get("judge/calls") for one in scored] == [1.0, None, None, None]
        assert len(endpoint.requests) == 1
        alone = await judge.score(TASK, ended("0.6", "eval", None), None)
        assert alone.parts == {"judge": 0.6}, "an evaluation has no group"
        await judge.close()


async def test_equal_questions_are_asked_once_also_at_the_same_time_and_after_a_restart(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "run" / "judge.sqlite"
    async with judging() as endpoint:
        endpoint.hold = asyncio.Event()
        judge = judge_of(endpoint, cache)
        both = [asyncio.create_task(judge.score(TASK, ended("0.3"), None)) for _ in range(3)]
        await eventually(lambda: endpoint.running == 1)
        endpoint.hold.set()
        scored = await asyncio.gather(*both)
        assert [one.reward for one in scored] == [0.3] * 3
        assert sorted(one.metrics["judge/calls"] for one in scored) == [0.0, 0.0, 1.0]
        assert sorted(one.metrics["judge/cached"] for one in scored) == [0.0, 1.0, 1.0]
        await judge.close()
        again = judge_of(endpoint, cache)
        later = await again.score(TASK, ended("0.3"), None)
        assert (later.reward, later.metrics["judge/cached"], later.metrics["judge/calls"]) == (0.3, 1.0, 0.0)
        assert len(endpoint.requests) == 1
        await again.close()
        for other in ({"model": "other"}, {"rubric": "be brief"}, {"options": {"temperature": 1}}):
            changed = judge_of(endpoint, cache, **other)
            await changed.score(TASK, ended("0.3"), None)
            await changed.close()
        assert len(endpoint.requests) == 4, "another judge or template has verdicts of its own"


@pytest.mark.parametrize("kind", ["score", "ranking"])
@pytest.mark.parametrize("order", [("one", "two", "three"), ("one", "three", "two")])
async def test_a_reply_is_kept_until_each_group_that_it_judges_is_erased(
    tmp_path: Path, kind: str, order: tuple[str, ...]
) -> None:
    cache = tmp_path / "judge.sqlite"
    async with judging() as endpoint:
        judge = judge_of(endpoint, cache, kind=kind)

        async def judged(group: str) -> None:
            if kind == "ranking":
                await judge.rank(TASK, [ended("0.3", group=group), ended("0.5", group=group)])
            else:
                await judge.score(TASK, ended("0.3", group=group), None)

        endpoint.hold = asyncio.Event()
        together = [asyncio.create_task(judged(group)) for group in ("one", "two")]
        await eventually(lambda: endpoint.running == 1)
        endpoint.hold.set()
        await asyncio.gather(*together)
        await judged("three")
        for group, calls in zip(order, (1, 1, 2), strict=True):
            erase_replies(cache, [group])
            await judged("one")  # an erased group does not keep the reply
            assert len(endpoint.requests) == calls
        await judge.close()


async def test_the_cache_is_bounded_and_its_failure_is_no_failure_of_the_verdict(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "c.sqlite", most=3)
    for number in range(5):
        cache.put(str(number), f"reply {number}")
        cache.put(str(number), "again")
    assert [cache.get(str(number)) for number in range(5)] == [None, None, *(f"reply {n}" for n in (2, 3, 4))]
    cache.close()
    assert ReplyCache(tmp_path / "c.sqlite", most=3).get("4") == "reply 4"
    (tmp_path / "broken.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="cannot open the judge's cache"):
        ReplyCache(tmp_path / "broken.sqlite")
    async with judging() as endpoint:
        judge = judge_of(endpoint)
        judge._verdicts._cache.close()
        assert (await judge.score(TASK, ended("0.3"), None)).reward == 0.3
        await judge.close()


async def test_calls_are_bounded() -> None:
    async with judging() as endpoint:
        endpoint.hold = asyncio.Event()
        judge = judge_of(endpoint, max_concurrency=2)
        asking = [asyncio.create_task(judge.score(TASK, ended(f"{n} 0.5"), None)) for n in range(6)]
        await eventually(lambda: endpoint.running == 2)
        endpoint.hold.set()
        await asyncio.gather(*asking)
        assert endpoint.most == 2
        await judge.close()


@pytest.mark.parametrize(
    ("reply", "why", "calls"),
    [
        ((503, "overloaded"), "status 503: overloaded", 2),
        ((429, "slow down"), "status 429: slow down", 2),
        ((401, "no such key"), "status 401: no such key", 1),
        ((413, "too long"), "status 413: too long", 1),
        ("I cannot decide.", "no scores in the reply", 2),
        ('{"scores": {"score": 7}}', "from 0 to 1", 2),
    ],
)
async def test_a_judge_that_fails_gives_no_reward(reply: Any, why: str, calls: int) -> None:
    async with judging() as endpoint:
        endpoint.reply = lambda _: reply
        judge = judge_of(endpoint, attempts=2)
        with pytest.raises(RewardError, match=why) as raised:
            await judge.score(TASK, ended("0.5"), Scored(1.0, {}))
        assert isinstance(raised.value, RewardUnavailableError) == (
            isinstance(reply, tuple) and reply[0] != 413
        )
        assert len(endpoint.requests) == calls
        assert raised.value.metrics["judge/errors"] == raised.value.metrics["judge/calls"] == calls
        endpoint.reply = graded
        assert (await judge.score(TASK, ended("0.5"), None)).reward == 0.5, "failures are not cached"
        await judge.close()


async def test_a_failed_call_is_repeated() -> None:
    replies = iter([(500, "oops"), "nothing", '{"scores": {"score": 0.5}}'])
    async with judging() as endpoint:
        endpoint.reply = lambda _: next(replies)
        judge = judge_of(endpoint)
        scored = await judge.score(TASK, ended("x"), None)
        assert scored.reward == 0.5
        assert (scored.metrics["judge/calls"], scored.metrics["judge/errors"]) == (3.0, 2.0)
        assert scored.metrics["judge/prompt_tokens"] == 20.0, "an unreadable reply costs, too"
        await judge.close()


async def test_a_judge_that_hangs_or_is_away_has_a_deadline() -> None:
    async with judging() as endpoint:
        endpoint.hold = asyncio.Event()
        judge = judge_of(endpoint, attempts=1, timeout_s=0.2)
        with pytest.raises(RewardUnavailableError, match=r"no reply within 0\.2 s \(env\.judge\.timeout_s\)"):
            await judge.score(TASK, ended("0.5"), None)
        await judge.close()
    judge = judge_of(endpoint, attempts=1)
    with pytest.raises(RewardUnavailableError, match="ClientConnectorError"):
        await judge.score(TASK, ended("0.5"), None)
    await judge.close()


async def test_the_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = JudgeSettings.model_validate(
        {"url": "http://j", "model": "m", "rubric": "r", "api_key_env": "JUDGE_KEY"}
    )
    with pytest.raises(ConfigError, match="this environment variable is not set"):
        settings.resolved()
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    async with judging() as endpoint:
        judge = judge_of(endpoint, api_key_env="JUDGE_KEY")
        await judge.score(TASK, ended("0.5"), None)
        assert endpoint.headers[0]["Authorization"] == "Bearer sk-1"
        await judge.close()


def test_the_rubric_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rubric.md"
    settings = JudgeSettings.model_validate({"url": "http://j", "model": "m", "rubric_file": file})
    with pytest.raises(ConfigError, match="No such file"):
        settings.resolved()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        settings.resolved()
    file.write_text("Be kind.\n")
    assert settings.resolved().rubric == "Be kind."


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model": "m"}, "env.judge.model has no effect without env.judge.url"),
        ({"url": "http://j"}, "needs env.judge.model"),
        ({"url": "http://j", "model": "m"}, "needs env.judge.rubric"),
        ({"url": "http://j", "model": "m", "rubric": "r", "rubric_file": "f"}, "exclude each other"),
        ({"url": "http://j", "model": "m", "kind": "criteria"}, "needs env.judge.criteria"),
        ({"url": "http://j", "model": "m", "rubric": "r", "criteria": {"a": {"rubric": "x"}}}, "no effect"),
        (
            {"url": "http://j", "model": "m", "kind": "criteria", "criteria": {"A b": {"rubric": "x"}}},
            "small letters",
        ),
        ({"url": "http://j", "model": "m", "rubric": "r", "options": {"n": 2}}, "cannot contain 'n'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        JudgeSettings.model_validate(settings)
