"""Checks that rewards distinguish gold answers from wrong ones and accept any output, and calls the judge."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.doctor.environment import TASKS, first_tasks
from tidegate.doctor.findings import Finding, Level, error, note, ok, warning
from tidegate.envs.base import Environment
from tidegate.envs.judge.judge import PART, RewardJudge
from tidegate.envs.service import scoring
from tidegate.envs.service.episodes import Episode, EpisodeError
from tidegate.errors import ConfigError, RewardError
from tidegate.service.threads import within
from tidegate.settings.judge import JudgeSettings
from tidegate.tracebacks import where
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Outcome, Scored, Task, Trajectory

SCORE_S = 10.0
WRONG_ANSWERS = ("", "I do not know.")


class Fault(Exception):
    """The reward of one output failed; `finding` has the cause."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


@dataclass(frozen=True, slots=True)
class Graded:
    """The rewards of one task's gold answer and of each wrong one."""

    task: Task
    gold: float
    wrong: list[float]


def check_rewards(environment: Environment) -> list[Finding]:
    """Grades gold and wrong answers; training cannot use a reward that does not distinguish them."""
    if not any(scorer.names for scorer in environment.rewarders().values()):
        why = "the environment has no reward: the agent's own counts (Result.reward)"
        return [note("rewards", "agent_rewards", why)]
    tasks = first_tasks(environment, TASKS)
    try:
        known = [gold for task in tasks if (gold := _gold(environment, task)) is not None]
        if len(known) < len(tasks):
            for output in WRONG_ANSWERS:
                score(environment, tasks[0], output)
            why = "tasks have no gold answer; the rewards were tried on wrong answers only"
            return [note("rewards", "no_gold", why)]
        graded = [_grade(environment, task, gold, known) for task, gold in zip(tasks, known, strict=True)]
    except Fault as fault:
        return [fault.finding]
    rewards = [reward for scorer in environment.rewarders().values() for reward in scorer.rewards]
    reads_trajectory = any("trajectory" in inspect.signature(reward.fn).parameters for reward in rewards)
    verdict = _verdict(graded, reads_trajectory)
    if verdict.level is not Level.OK and any(reward.needs_state for reward in rewards):
        why = "rewards read the state, which only an episode changes; they were tried on that of setup()"
        return [note("rewards", "reads_state", why)]
    return [verdict]


def _gold(environment: Environment, task: Task) -> str | None:
    try:
        gold: object = within(SCORE_S, lambda: environment.gold_output(task))
    except Exception as failure:
        text = f"gold_output() raised {type(failure).__name__} on task {task.id}: {failure}{where(failure)}"
        raise Fault(error("rewards", "gold_raised", text)) from failure
    if gold is not None and not isinstance(gold, str):
        text = f"gold_output() gives {gold!r} for task {task.id}; an output is text, or None"
        raise Fault(error("rewards", "gold_raised", text))
    return gold


def _grade(environment: Environment, task: Task, gold: str, golds: Sequence[str]) -> Graded:
    """Wrong answers: empty output, unrelated text, another task's answer (right form, wrong content)."""
    others = [one for one in golds if one != gold][:1]
    scores = [score(environment, task, output) for output in (gold, *WRONG_ANSWERS, *others)]
    return Graded(task, scores[0], scores[1:])


def _verdict(graded: Sequence[Graded], reads_trajectory: bool) -> Finding:
    every = {one for row in graded for one in (row.gold, *row.wrong)}
    gold = sum(row.gold for row in graded) / len(graded)
    wrong = sum(max(row.wrong) for row in graded) / len(graded)
    poor = [row.task.id for row in graded if row.gold <= max(row.wrong)]
    means = f"mean reward: gold answers {gold:.3g}, best wrong answers {wrong:.3g} ({len(graded)} tasks)"
    if not poor:
        return ok("rewards", means)
    fix = (
        "tidegate eval --gold grades every answer; define gold_output() if the gold output is not the answer"
    )
    # A reward that reads the trajectory may need a real one.
    bad = Level.WARNING if reads_trajectory else Level.ERROR
    if len(every) == 1:
        text = f"your reward is constant: gold and wrong answers all earn {gold:g}, so nothing can be learned"
        return Finding("rewards", bad, "reward_constant", text, fix)
    if gold <= wrong:
        return Finding(
            "rewards", bad, "gold_no_better", f"gold answers score no higher than wrong ones: {means}", fix
        )
    text = (
        f"the gold answer scores no higher than a wrong one on {len(poor)} of {len(graded)} tasks, such as "
        f"{poor[0]}; {means}"
    )
    return warning("rewards", "gold_sometimes_no_better", text, fix)


def score(environment: Environment, task: Task, output: str) -> float:
    """Returns the reward of an output, with a new state; raises Fault if it raises, hangs, or is not a finite
    number."""
    on = f"on the output {output[:60]!r} of task {task.id}"
    messages = [*task.messages, {"role": "assistant", "content": output}]
    trajectory = Trajectory(
        "doctor", task.id, task.env, "train", Outcome.COMPLETED, [_turn()], output=output, messages=messages
    )
    scorer = environment.rewarders()[task.env]
    try:
        return within(SCORE_S, lambda: asyncio.run(_scored(scorer, task, trajectory))).reward
    except TimeoutError:
        text, code = f"your reward took longer than {SCORE_S:g} s {on}", "reward_hung"
    except RewardError as failure:
        code = "reward_not_finite" if "not a finite number" in str(failure) else "reward_raised"
        text = f"your reward failed {on}: {failure}"
    except EpisodeError as failure:
        text, code = f"{failure}, {on}", "state_raised"
    raise Fault(error("rewards", code, text))


async def _scored(scorer: Environment, task: Task, trajectory: Trajectory) -> Scored:
    """Raises RewardError, or EpisodeError if the state cannot be made or released."""
    episode = Episode(scorer, task)
    await episode.setup()
    try:
        return await scoring.score(
            scorer, task, trajectory, trajectory.output, trajectory.messages, episode.state
        )
    finally:
        await episode.teardown()


def _turn() -> Turn:
    """Returns an empty turn, for rewards that read turns."""
    ids = np.zeros(1, np.int32)
    return Turn(0, None, ids, ids, np.zeros(1, np.float32), (VersionSpan(0, 0, 1),), "stop", 1.0)


async def check_judge(settings: JudgeSettings, environment: Environment) -> list[Finding]:
    """Calls the judge once, with the first task's gold answer or a wrong one; nothing without a judge."""
    if settings.url is None:
        return []
    try:
        judge = RewardJudge(settings.resolved())
    except ConfigError as failure:
        return [error("judge", "judge_unusable", str(failure))]
    task = first_tasks(environment, 1)[0]
    output = environment.gold_output(task) or WRONG_ANSWERS[1]
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
