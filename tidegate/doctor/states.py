"""Checks the states and tools of a stateful environment."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

from tidegate.doctor.environment import TASKS, first_tasks
from tidegate.doctor.findings import Finding, error, ok, warning
from tidegate.doctor.timeout import within
from tidegate.envs.base import Environment
from tidegate.envs.service.episodes import Episode, EpisodeError
from tidegate.types import Task

EPISODE_S = 30.0
"""Timeout of two set-ups and teardowns."""


def check_states(environment: Environment) -> list[Finding]:
    """Sets one task of each environment up twice, and checks its tools; nothing is found without state."""
    found: list[Finding] = []
    scorers = environment.rewarders()
    for scorer in scorers.values():
        found += _rewards(scorer)
        found += _tools(scorer)
    tasks = {task.env: task for task in reversed(first_tasks(environment, TASKS))}
    for name, task in tasks.items():
        if scorers[name].stateful:
            found += _state(scorers[name], task)
    if found or not any(scorer.stateful for scorer in scorers.values()):
        return found
    return [ok("states", "set-up and teardown work")]


def _rewards(scorer: Environment) -> Iterator[Finding]:
    if type(scorer).setup is not Environment.setup:
        return
    for reward in scorer.rewards:
        if reward.needs_state:
            text = (
                f"the reward {reward.name!r} asks for the state, and {scorer.name!r} has no setup(): "
                "it would always receive None"
            )
            fix = "define setup(task), or remove the parameter 'state'"
            yield error("states", "state_without_setup", text, fix)


def _tools(scorer: Environment) -> Iterator[Finding]:
    for tool in scorer.tools():
        if not tool.description:
            text = f"the tool {tool.name!r} has no description, so that a model cannot know what it does"
            yield warning("states", "tool_undescribed", text, "write a docstring")
        properties = tool.parameters.get("properties", {})
        silent = [name for name, schema in properties.items() if not schema.get("description")]
        if silent:
            text = f"the tool {tool.name!r} does not describe {', '.join(map(repr, silent))}"
            yield warning("states", "tool_undescribed", text, "describe each parameter under 'Args:'")


def _state(scorer: Environment, task: Task) -> Iterator[Finding]:
    try:
        equal = within(EPISODE_S, lambda: asyncio.run(_set_up_twice(scorer, task)))
    except TimeoutError as failure:
        text = f"setup and teardown of {scorer.name!r} don't end on task {task.id}: {failure}"
        yield error("states", "state_hung", text)
    except EpisodeError as failure:
        yield error("states", "state_raised", f"on task {task.id}, {failure}")
    else:
        if not equal:
            text = (
                f"setup() gives another state for the same task {task.id}: the episodes of a group would not "
                "start alike"
            )
            fix = "draw from random.Random(task.id); names of files and connections may differ"
            yield warning("states", "setup_changes", text, fix)


async def _set_up_twice(scorer: Environment, task: Task) -> bool:
    """Returns whether both states are equal, as far as they can be compared."""
    one, other = Episode(scorer, task), Episode(scorer, task)
    await one.setup()
    try:
        await other.setup()
        try:
            return not _compares(one.state) or bool(one.state == other.state)
        finally:
            await other.teardown()
    finally:
        await one.teardown()


def _compares(state: Any) -> bool:
    """Returns whether `==` compares a state by its value: then it equals its copy."""
    try:
        return bool(state == copy.deepcopy(state))
    except Exception:  # noqa: BLE001 - a user's object may raise anything
        return False
