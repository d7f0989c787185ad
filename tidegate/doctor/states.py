"""Checks the tools, states and other side of environments that have them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tidegate.doctor.comparison import IncomparableError, difference
from tidegate.doctor.environment import TASKS, first_tasks
from tidegate.doctor.findings import Finding, error, failed, note, ok, warning
from tidegate.doctor.timeout import within
from tidegate.envs.base import Environment
from tidegate.envs.service.episodes import Episode, EpisodeError
from tidegate.types import Task

REPLY = {"role": "assistant", "content": "I do not know."}


def check_states(environment: Environment, call_timeout_s: float) -> list[Finding]:
    """Checks each environment that scores tasks, if it has a state, tools or another side.

    Args:
        environment: The environment, whose training tasks are used.
        call_timeout_s: Timeout of `setup`, `respond` and `teardown` each.
    """
    tasks = first_tasks(environment, TASKS)
    found: list[Finding] = []
    for name, scorer in environment.rewarders().items():
        task = next((task for task in tasks if task.env == name), None)
        wrong = [*_rewards(name, scorer), *_tools(name, scorer)]
        if not failed(wrong) and scorer.stateful and task is not None:
            wrong += _tried(scorer, task, call_timeout_s)
            if not failed(wrong):
                tools = len(scorer.tools())
                wrong.append(ok("state", f"{name}: {tools} tool{'' if tools == 1 else 's'}; setup, respond "
                                         "and teardown were run"))  # fmt: skip
        found += wrong
    return found


def _rewards(name: str, environment: Environment) -> Iterator[Finding]:
    named = [reward.name for reward in environment.rewards if reward.needs_state]
    if named and type(environment).setup is Environment.setup:
        text = f"the reward {named[0]!r} of {name!r} asks for the state, but there is no setup: it gets None"
        yield error("state", "reward_without_state", text, "define setup(task), or remove the parameter")


def _tools(name: str, environment: Environment) -> Iterator[Finding]:
    try:
        tools, again = environment.tools(), environment.tools()
    except Exception as failure:  # noqa: BLE001 - it may be the user's own
        text = f"the tools of {name!r} cannot be described: {failure}"
        yield error("state", "tools_invalid", text, "each parameter of a tool needs a type hint")
        return
    if [tool.schema() for tool in tools] != [tool.schema() for tool in again]:
        text = f"tools() of {name!r} gives other tools each time: the gateway reads them once"
        yield error("state", "tools_change", text)
    for tool, number in Counter(tool.name for tool in tools).items():
        if number > 1:
            yield error("state", "tools_double", f"{name!r} has {number} tools named {tool!r}; rename one")
    bare = [tool.name for tool in tools if not tool.description]
    bare += [
        f"{tool.name}({parameter})"
        for tool in tools
        for parameter, schema in tool.parameters.get("properties", {}).items()
        if not schema.get("description")
    ]
    if bare:
        text = f"without a description, which the model reads: {', '.join(bare)}"
        yield warning("state", "tools_undescribed", text, "a docstring, with the parameters under 'Args:'")


def _tried(environment: Environment, task: Task, timeout_s: float) -> list[Finding]:
    try:
        return within(6 * timeout_s, lambda: asyncio.run(_run_twice(environment, task, timeout_s)))
    except TimeoutError:
        text = f"setup, respond or teardown blocks for longer than env.call_timeout_s = {timeout_s:g}"
        return [error("state", "state_hung", text, "await slow operations, or use asyncio.to_thread")]


async def _run_twice(environment: Environment, task: Task, timeout_s: float) -> list[Finding]:
    """Makes the states of two episodes, compares them, and tears both down."""
    episodes = [Episode(environment, task) for _ in range(2)]
    found: list[Finding] = []
    ready = []
    for episode in episodes:
        if not (wrong := await _step("setup", episode.setup(), task, timeout_s)):
            ready.append(episode)
        found += wrong[: 1 if not found else 0]
    if len(ready) == 2:
        found += _alike(ready[0].state, ready[1].state, task)
        found += await _step("respond", ready[0].respond(dict(REPLY)), task, timeout_s)
    for episode in ready:
        wrong = await _step("teardown", episode.teardown(), task, timeout_s)
        found += [one for one in wrong if one not in found]
    return found


async def _step(name: str, call: Any, task: Task, timeout_s: float) -> list[Finding]:
    try:
        async with asyncio.timeout(timeout_s):
            await call
    except TimeoutError:
        text = f"{name} of task {task.id} took longer than {timeout_s:g} s (env.call_timeout_s)"
        return [error("state", f"{name}_hung", text)]
    except EpisodeError as failure:
        return [error("state", f"{name}_raised", f"on task {task.id}, {failure}")]
    return []


def _alike(one: Any, other: Any, task: Task) -> Iterator[Finding]:
    try:
        place = difference(one, other)
    except (IncomparableError, RecursionError) as failure:
        text = f"whether setup is deterministic was not checked: {failure}"
        yield note("state", "setup_not_compared", text)
        return
    if place is not None:
        text = (
            f"setup gives two states for the task {task.id}: {place} differs. If agents or rewards see it, "
            "the episodes of a group do not start alike"
        )
        yield warning("state", "setup_differs", text, "draw from random.Random(task.id)")
