"""Checks the environment's tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tidegate.config import Settings
from tidegate.doctor.findings import Finding, error, ok, warning
from tidegate.envs.base import Environment, check_reward_timeout, load_environment
from tidegate.errors import ConfigError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.service.threads import within
from tidegate.tracebacks import where
from tidegate.types import Task

TASKS = 8
TRAINED = 256
"""Number of training tasks that are compared with the held-out ones."""
CALL_S = 10.0


def check_environment(
    settings: Settings, renderer: Renderer | None
) -> tuple[list[Finding], Environment | None]:
    """Loads the environment and checks its tasks; returns no environment if it cannot be used."""
    use = settings.env.use
    try:
        environment = within(60.0, lambda: load_environment(use, settings.env.options))
        check_reward_timeout(environment, settings.env.reward_timeout_s)
    except (ConfigError, TimeoutError) as failure:
        return [error("environment", "environment_unloadable", str(failure))], None
    except Exception as failure:  # noqa: BLE001 - a user's constructor may raise anything
        what = f"{type(failure).__name__}: {failure}{where(failure)}"
        text = f"making the environment {use!r} raised {what}"
        return [error("environment", "environment_raised", text)], None
    try:
        found = within(CALL_S * 3, lambda: list(_tasks(settings, environment, renderer)))
    except TimeoutError as failure:
        text = f"train_task or eval_sets of {use!r} did not return: {failure}"
        return [error("environment", "environment_hung", text)], None
    except Exception as failure:  # noqa: BLE001 - so may its methods
        what = f"{type(failure).__name__}: {failure}{where(failure)}"
        text = f"train_task or eval_sets of {use!r} raised {what}"
        return [error("environment", "environment_raised", text)], None
    return found or [ok("environment", f"{use}: its tasks are valid")], environment


def first_tasks(environment: Environment, number: int) -> list[Task]:
    size = environment.train_size()
    return [environment.train_task(index) for index in range(number if size is None else min(number, size))]


def _tasks(settings: Settings, environment: Environment, renderer: Renderer | None) -> Iterator[Finding]:
    tasks = first_tasks(environment, TASKS)
    again = first_tasks(environment, TASKS)
    if not tasks:
        yield error("environment", "no_tasks", "the environment has no training task")
        return
    if unsound := next((finding for task in tasks for finding in _wire(task)), None):
        yield unsound
        return
    if [task.to_wire() for task in tasks] != [task.to_wire() for task in again]:
        text = "train_task gives another task for the same index: a run could not be resumed"
        yield error("environment", "tasks_change", text, "draw from random.Random(index)")
    scorers = set(environment.rewarders())
    strange = {task.env for task in tasks} - scorers
    if strange:
        text = (
            f"tasks have env = {strange.pop()!r}, and the environment's "
            f"name is {', '.join(map(repr, sorted(scorers)))}: no reward would be found for "
            "them"
        )
        yield error("environment", "task_env", text, "Task(env=self.name)")
    if renderer is not None:
        yield from _prompt(settings, tasks[0], renderer)
    yield from _held_out(environment)


def _wire(task: Task) -> Iterator[Finding]:
    said: Any = task.messages  # whatever the user's code put there
    if isinstance(said, str) or not all(isinstance(message, dict) for message in said):
        text = f"the task {task.id} has the messages {said!r:.80}, which are not a list of messages"
        fix = 'Task(id, env, [{"role": "user", "content": "..."}], answer)'
        yield error("environment", "task_messages", text, fix)
        return
    try:
        json.dumps(task.to_wire())
    except (TypeError, ValueError) as failure:
        text = f"the task {task.id} can't be sent to the gateway: {failure}"
        yield error("environment", "task_not_json", text, "answer, info and messages must be JSON values")


def _prompt(settings: Settings, task: Task, renderer: Renderer) -> Iterator[Finding]:
    try:
        size = len(renderer.encode_prompt(list(task.messages), None, {}))
    except ApiError as failure:
        yield error("environment", "prompt_refused", f"the task {task.id}: {failure}")
        return
    context = settings.engine.context
    if context is None:  # the engine's own limit, which the episode shows
        return
    room = context - size
    if room <= 0:
        text = (
            f"the task {task.id} has {size} tokens, more than "
            f"engine.max_context = {settings.engine.max_context}"
        )
        yield error("environment", "prompt_too_long", text, "raise engine.max_context")
    elif room < settings.sampling.max_tokens:
        text = (
            f"the task {task.id} leaves {room} tokens of "
            f"engine.max_context to replies, less than sampling.max_tokens = "
            f"{settings.sampling.max_tokens}"
        )
        yield warning("environment", "prompt_too_long", text, "raise engine.max_context")


def _held_out(environment: Environment) -> Iterator[Finding]:
    sets = environment.eval_sets()
    if not sets.get(""):
        yield error("environment", "no_held_out", 'eval_sets() has no main held-out set: the key ""')
        return
    # The tasks of a stateful environment may differ in nothing but what its state is made of.
    stateful = environment.stateful

    def problem(task: Task) -> str:
        return json.dumps([list(task.messages), dict(task.info) if stateful else None], default=str)

    trained = set(map(problem, first_tasks(environment, TRAINED)))
    both = [task.id for task in sets[""] if problem(task) in trained]
    if both:
        text = (
            f"{len(both)} of {len(sets[''])} held-out tasks are "
            f"among the first {TRAINED} training tasks ({both[0]}): the held-out reward would "
            "be too high"
        )
        yield warning("environment", "held_out_trained", text, "split by a hash of the problem")
