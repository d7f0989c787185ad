"""Checks that the judge gives a verdict."""

from __future__ import annotations

from tidegate.doctor.environment import first_tasks
from tidegate.doctor.findings import Finding, error, ok
from tidegate.envs.base import Environment
from tidegate.envs.judge.judge import PART, RewardJudge
from tidegate.errors import ConfigError, RewardError
from tidegate.settings.judge import JudgeSettings
from tidegate.types import Outcome, Trajectory

UNKNOWN = "I do not know."


async def check_judge(settings: JudgeSettings, environment: Environment) -> list[Finding]:
    """Calls the judge once, with the first task's gold answer or `UNKNOWN`; nothing without a judge."""
    if settings.url is None:
        return []
    try:
        judge = RewardJudge(settings.resolved())
    except ConfigError as failure:
        return [error("judge", "judge_unusable", str(failure))]
    task = first_tasks(environment, 1)[0]
    output = environment.gold_output(task) or UNKNOWN
    reply = [*task.messages, {"role": "assistant", "content": output}]
    episode = Trajectory("", task.id, task.env, "eval", Outcome.COMPLETED, [], output=output, messages=reply)
    try:
        scored = await judge.score(task, episode, None)
    except RewardError as failure:
        fix = "check env.judge.url, env.judge.model and the endpoint's log"
        return [error("judge", "no_verdict", str(failure), fix)]
    finally:
        await judge.close()
    costs = scored.metrics
    return [
        ok(
            "judge",
            f"{settings.model} gives {output[:40]!r} the score {scored.parts[PART]:g} in "
            f"{costs['judge/seconds']:.1f} s, with {costs['judge/prompt_tokens']:.0f} prompt tokens and "
            f"{costs['judge/completion_tokens']:.0f} completion tokens",
        )
    ]
