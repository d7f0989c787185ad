"""The doctor asks a judge once."""

from __future__ import annotations

from typing import Any

from tests.scripted_judge import judging
from tidegate.doctor.findings import Finding, Level
from tidegate.doctor.rewards import check_judge
from tidegate.envs.arithmetic import Arithmetic
from tidegate.settings.judge import JudgeSettings


async def checked(**settings: Any) -> list[Finding]:
    return await check_judge(JudgeSettings.model_validate(settings), Arithmetic())


async def test_without_a_judge_nothing_is_checked() -> None:
    assert await checked() == []


async def test_a_verdict_is_shown_with_its_costs() -> None:
    async with judging() as endpoint:
        endpoint.reply = lambda _: '{"scores": {"score": 0.75}}'
        [finding] = await checked(**endpoint.settings())
    assert finding.level is Level.OK
    assert "the score 0.75" in finding.text
    assert "10 prompt tokens and 3 completion tokens" in finding.text


async def test_a_judge_that_cannot_be_used_is_an_error() -> None:
    async with judging() as endpoint:
        endpoint.reply = lambda _: (404, "no such model")
        [failed] = await checked(**endpoint.settings())
        [keyless] = await checked(**endpoint.settings(api_key_env="NO_SUCH_KEY"))
    assert (failed.level, failed.code) == (Level.ERROR, "no_verdict")
    assert "status 404: no such model" in failed.text
    assert (keyless.level, keyless.code) == (Level.ERROR, "judge_unusable")
