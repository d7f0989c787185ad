"""Environments of verifiers through Tidegate, and the agent that runs the library's own loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("verifiers")

from tests.http_app import served_app
from tests.unit.adapters.scored import PEERS, equal_scores
from tidegate.agents.base import Result, Session, load_agent
from tidegate.envs.base import Done, Environment, load_environment
from tidegate.envs.tools import ToolError
from tidegate.errors import ConfigError, RewardError
from tidegate.types import Message


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


def said(content: str) -> Message:
    return {"role": "assistant", "content": content}


async def scored(environment: Environment, task: Any, messages: list[Message], state: Any) -> Any:
    awaited = await environment.await_rewards(task, None, messages[-1]["content"], messages, state)
    return environment.score(task, None, messages[-1]["content"], messages, state, awaited)


def test_scores_are_the_librarys() -> None:
    equal_scores("verifiers")


async def test_gold_outputs_are_right_and_the_rubrics_metrics_are_recorded() -> None:
    environment = load_environment("verifiers:mirror-words", {"held_out": 20})
    held_out = environment.eval_sets()[""]
    assert len(held_out) == 20
    for task in held_out[:5]:
        state = await environment.setup(task)
        gold = environment.gold_output(task)
        assert gold is not None
        result = await scored(environment, task, [*task.messages, said(gold)], state)
        assert (result.reward, result.parts) == (1.0, {"score": 1.0})
        assert result.metrics == {"exact": 1.0, "matching": 1.0, "num_turns": 1.0}
        await environment.teardown(state)


async def test_turns_are_the_librarys_and_an_early_end_is_scored_as_it_stands() -> None:
    environment = load_environment("verifiers:guess-digit", {})
    task = next(task for task in map(environment.train_task, range(99)) if task.answer == "3")
    state = await environment.setup(task)
    first, second = said("2"), said("3")
    assert await environment.respond(state, first) == {"role": "user", "content": "higher"}
    assert await environment.respond(state, second) == Done()
    messages = [*task.messages, first, {"role": "user", "content": "higher"}, second]
    assert (await scored(environment, task, messages, state)).reward == 0.5
    await environment.teardown(state)

    state = await environment.setup(task)
    await environment.respond(state, first)
    result = await scored(environment, task, messages[:2], state)
    assert (result.reward, result.metrics["num_turns"]) == (0.0, 1.0)
    await environment.teardown(state)


async def test_an_unfinished_rollout_ends_with_its_episode() -> None:
    environment = load_environment("verifiers:guess-digit", {})
    state = await environment.setup(environment.train_task(0))
    await environment.teardown(state)
    assert state.running.done()


async def test_tools_can_be_called_and_refuse_what_is_wrong() -> None:
    environment = load_environment("verifiers:adding-tool", {})
    state = await environment.setup(environment.train_task(0))
    [tool] = environment.tools()
    assert tool.schema()["function"]["description"] == "Adds two numbers."
    assert await tool.fn(state, {"a": 40, "b": 2}) == "42"
    with pytest.raises(ToolError, match="unexpected keyword argument 'c'"):
        await tool.fn(state, {"c": 1})
    await environment.teardown(state)


async def test_a_failed_rubric_is_a_reward_error(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: Any = load_environment("verifiers:mirror-words", {})
    task = environment.train_task(0)
    state = await environment.setup(task)

    async def broken(*_: object) -> None:
        raise OSError("no judge")

    monkeypatch.setattr(environment.library.rubric, "score_rollout", broken)
    with pytest.raises(RewardError, match="OSError: no judge"):
        await scored(environment, task, [*task.messages, said("x")], state)
    await environment.teardown(state)


def test_held_out_rows_are_not_trained_on_and_the_order_follows_from_the_seed() -> None:
    environment = load_environment("verifiers:guess-digit", {"held_out": 30})
    again = load_environment("verifiers:guess-digit", {"held_out": 30})
    size = environment.train_size()
    assert size == 270
    trained = [environment.train_task(index) for index in range(size)]
    assert [again.train_task(index) for index in range(size)] == trained
    assert not {task.id for task in trained} & {task.id for task in environment.eval_sets()[""]}


def test_names_and_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"no installed package 'mirror_word'.*did you mean 'mirror-words'"):
        load_environment("verifiers:mirror-word", {})
    with pytest.raises(ConfigError, match=r"cannot be loaded: TypeError.*'size'"):
        load_environment("verifiers:mirror-words", {"args": {"size": 3}})


class Completions:
    """Answers of an endpoint, one after another."""

    def __init__(self, *replies: Message) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[Completions, Session]]:
    from aiohttp import web

    script = Completions()

    async def complete(request: web.Request) -> web.Response:
        script.requests.append(await request.json())
        message = script.replies.pop(0)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
        return web.json_response({**body, "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with served_app(app) as url:
        yield script, Session(f"{url}/v1", "key", "policy", None, time.monotonic() + 60)


async def test_the_agent_runs_and_scores_episodes_by_the_librarys_loop(endpoint: Any) -> None:
    script, session = endpoint
    environment = load_environment("verifiers:adding-tool", {"score": False})
    assert (environment.names, environment.stateful) == ([], False)
    agent = load_agent("verifiers", {"id": "adding-tool"})
    task = environment.train_task(0)
    a, _, b, *_ = task.messages[-1]["content"].split()
    call = {"name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'}
    calls = [{"id": "1", "type": "function", "function": call}]
    script.replies = [{"role": "assistant", "content": None, "tool_calls": calls}, said(str(task.answer))]
    result = await asyncio.wait_for(agent.run(task.view(), session), 30)
    assert isinstance(result, Result)
    assert (result.output, result.reward) == (task.answer, 1.0)
    assert result.metrics["add_calls"] == 1.0
    assert script.requests[1]["messages"][-1]["content"] == task.answer
    assert script.requests[0]["tools"][0]["function"]["name"] == "add"


async def test_a_failed_rollout_fails_the_agent(endpoint: Any) -> None:
    script, session = endpoint
    agent = load_agent("verifiers", {"id": "mirror-words"})
    task = load_environment("verifiers:mirror-words", {"score": False}).train_task(0)
    script.replies = [{"role": "assistant", "content": 3}]
    with pytest.raises(RuntimeError, match="the rollout of verifiers failed"):
        await asyncio.wait_for(agent.run(task.view(), session), 30)
