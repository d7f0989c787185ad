"""Checks the states and tools of a stateful environment."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from tidegate.doctor.comparison import IncomparableError, difference
from tidegate.doctor.environment import TASKS, first_tasks
from tidegate.doctor.findings import Finding, Level, error, note, ok, warning
from tidegate.envs.base import Environment
from tidegate.envs.service.episodes import Episode, EpisodeError
from tidegate.service.threads import within
from tidegate.types import Task

EPISODE_S = 30.0
"""Timeout of two set-ups and teardowns."""
REPLY = {"role": "assistant", "content": "I do not know."}


def check_states(environment: Environment) -> list[Finding]:
    """Sets one task of each environment up twice, and checks its tools; nothing is found without state."""
    found: list[Finding] = []
    scorers = environment.rewarders()
    for scorer in scorers.values():
        found += _rewards(scorer)
        found += _tools(scorer)
    if any(finding.level is Level.ERROR for finding in found):
        return found
    tasks = {task.env: task for task in reversed(first_tasks(environment, TASKS))}
    for name, task in tasks.items():
        if scorers[name].stateful:
            found += _state(scorers[name], task)
    if found or not any(scorer.stateful for scorer in scorers.values()):
        return found
    return [ok("states", "setup, respond and teardown work")]


def _rewards(scorer: Environment) -> Iterator[Finding]:
    if type(scorer).setup is not Environment.setup:
        return
    for reward in scorer.rewards:
        if reward.needs_state:
            text = (
                f"the reward {reward.name!r} reads the state, and {scorer.name!r} has no setup(): "
                "it would always receive None"
            )
            fix = "define setup(task), or remove the parameter 'state'"
            yield error("states", "state_without_setup", text, fix)


def _tools(scorer: Environment) -> Iterator[Finding]:
    try:
        tools = scorer.tools()
    except Exception as failure:  # noqa: BLE001 - an environment's own tools() may raise anything
        text = f"the tools of {scorer.name!r} cannot be described: {failure}"
        yield error("states", "tools_invalid", text, "each parameter of a tool needs a type hint")
        return
    for name, number in Counter(tool.name for tool in tools).items():
        if number > 1:
            yield error("states", "tools_double", f"{scorer.name!r} has {number} tools named {name!r}")
    for tool in tools:
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
        place = within(EPISODE_S, lambda: asyncio.run(_set_up_twice(scorer, task)))
    except TimeoutError as failure:
        text = f"setup, respond or teardown of {scorer.name!r} did not return on task {task.id}: {failure}"
        yield error("states", "state_hung", text)
    except EpisodeError as failure:
        yield error("states", "state_raised", f"on task {task.id}, {failure}")
    except (IncomparableError, RecursionError) as failure:
        text = f"it was not checked whether setup() is deterministic: {failure}"
        yield note("states", "setup_not_compared", text)
    else:
        if place is not None:
            text = (
                f"setup() gives another state for the same task {task.id}: {place} differs, so the episodes "
                "of a group would not start alike"
            )
            fix = "draw from random.Random(task.id); names of files and connections may differ"
            yield warning("states", "setup_changes", text, fix)


async def _set_up_twice(scorer: Environment, task: Task) -> str | None:
    """Makes two states and has one of them answer a reply; returns the place at which they differed."""
    one, other = Episode(scorer, task), Episode(scorer, task)
    async with contextlib.AsyncExitStack() as stack:
        for episode in (one, other):
            await episode.setup()
            stack.push_async_callback(episode.teardown)
        stack.push_async_callback(one.respond, dict(REPLY))
        return difference(one.state, other.state)
