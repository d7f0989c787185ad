"""Runs many sessions against one gateway at a time; stops at the first failure and prints how to reproduce
it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.environments import LocalEnvironments, Safe
from tests.fakes import Stage, staged
from tests.fuzzing.clients import ClientStory
from tests.fuzzing.dialects import DIALECTS
from tests.fuzzing.stories import Case, Failure, PromptEngine, Story
from tests.fuzzing.tools import ToolStory, tool_story
from tests.fuzzing.values import smaller
from tests.fuzzing.workers import WorkerStory
from tests.remote_workers import WORKER_KEY
from tidegate.gateway.project_keys import create_key
from tidegate.types import Task

CASES_A_STORY = 40
CLIENT_STORIES = 5
"""One story in so many is that of a client with a project key."""
WORKER_STORIES = 11
"""One other story in so many is that of a worker."""
TOOL_STORIES = 7
"""One other story in so many is that of an agent with tools."""
_AT_ONCE = 16
_SHRINKING = 300  # cases


@dataclass(frozen=True, slots=True)
class Plan:
    """Which stories: `count` of them from `first` on, told to a gateway with this chat template."""

    seed: int
    template: str
    count: int
    first: int = 0
    cases: int = CASES_A_STORY


@contextlib.asynccontextmanager
async def fuzzed(model: Path) -> AsyncIterator[tuple[Stage, aiohttp.ClientSession]]:
    """A gateway to be fuzzed, its journal beside the model, and a client without limits; at the end the
    gateway must be well."""
    keys = model.parent / "keys.json"
    create_key(keys, "none")
    environments = LocalEnvironments(Safe())
    options = {
        "keys": keys,
        "worker_key": WORKER_KEY,
        "conversation_idle_s": 3600.0,
        "environments": environments,
    }
    async with staged(model, engine_type=PromptEngine, journal=model.parent / "journal", **options) as stage:
        stage.engine.encode = stage.gateway.renderer.encode
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            yield stage, http
        gateway = stage.gateway
        assert gateway.failed is None, gateway.failed
        assert not gateway.sessions.all()


async def drive(model: Path, plan: Plan) -> Counter[str]:
    """Tell the plan's stories; returns how often each status came. Raises Failure."""
    seen: Counter[str] = Counter()
    with _errors_logged() as errors:
        async with fuzzed(model) as (stage, http):
            await _tell_all(stage, http, plan, seen)
    assert not errors, f"the gateway logged errors, the first: {errors[0]}"
    return seen


async def _tell_all(stage: Stage, http: aiohttp.ClientSession, plan: Plan, seen: Counter[str]) -> None:
    numbers = iter(range(plan.first, plan.first + plan.count))
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_AT_ONCE, plan.count)):
                group.create_task(_tell(stage, http, plan, numbers, seen))
    except* Failure as failures:
        failed = failures.exceptions[0]
    if failed is not None:
        raise failed


async def _tell(
    stage: Stage, http: aiohttp.ClientSession, plan: Plan, numbers: Iterator[int], seen: Counter[str]
) -> None:
    for number in numbers:
        story: Story | ClientStory | ToolStory | WorkerStory
        if number % CLIENT_STORIES == CLIENT_STORIES - 1:
            story = _client_story(stage, http, plan.seed, number)
        elif number % TOOL_STORIES == TOOL_STORIES - 1:
            story = await tool_story(stage, http, f"{plan.seed}/{number}")
        elif number % WORKER_STORIES == WORKER_STORIES - 1:
            story = WorkerStory(stage, http, f"worker{number}", f"{plan.seed}/{number}")
        else:
            story = await _session_story(stage, http, plan.seed, number)
        try:
            await story.run(plan.cases)
        except Failure as failure:
            failure.where = f"--template {plan.template} --seed {plan.seed} --story {number}"
            if failure.case is not None and isinstance(story, Story | ClientStory):
                failure.case = await _shrunk(stage, http, failure.case)
            raise
        seen += story.seen


async def _session_story(stage: Stage, http: aiohttp.ClientSession, seed: int, number: int) -> Story:
    dialect = list(DIALECTS.values())[number % len(DIALECTS)]
    access = await stage.client.open_session(task=Task("t", "none", [], answer="4711"))
    return Story(stage, access, http, dialect, f"{seed}/{number}")


def _client_story(stage: Stage, http: aiohttp.ClientSession, seed: int, number: int) -> ClientStory:
    name = f"client{number}"
    key = create_key(stage.gateway.options.keys or Path(), name)
    stage.gateway.keys.reload()
    return ClientStory(stage, http, name, key, f"{seed}/{number}")


async def _shrunk(stage: Stage, http: aiohttp.ClientSession, case: Case) -> Case:
    """The smallest request found that fails alone in a fresh session; the case itself if none does."""

    async def fails(body: bytes) -> bool:
        access = await stage.client.open_session()
        story = Story(stage, access, http, case.dialect, "")
        headers = {"authorization": f"Bearer {access.api_key}"}
        try:
            await story.send(Case(body, headers, case.dialect, []))
        except Failure:
            return True
        return False

    if not await fails(case.body):
        return case
    best, left = case.body, _SHRINKING
    with contextlib.suppress(ValueError, RecursionError):
        shrinking = True
        while shrinking and left > 0:
            shrinking = False
            for value in smaller(json.loads(best)):
                left -= 1
                body = json.dumps(value).encode()
                if await fails(body):
                    best, shrinking = body, True
                    break
                if left <= 0:
                    break
    return Case(best, case.headers, case.dialect, [])


def told(failure: Failure) -> str:
    """A failure in words: what, how to see it again, and the request whole."""
    lines = [failure.what, f"again: python -m tests.fuzzing {failure.where}"]
    if failure.case is not None:
        lines += [f"headers: {failure.case.headers}", f"body: {failure.case.body!r}"]
    return "\n".join(lines)


@contextlib.contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """What was logged as an error meanwhile: by the gateway, or by asyncio of a task that nobody awaited."""
    errors: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(self.format(record))

    keep = Keep(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("tidegate", "asyncio", "uvicorn.error")]
    for logger in loggers:
        logger.addHandler(keep)
    try:
        yield errors
    finally:
        for logger in loggers:
            logger.removeHandler(keep)
