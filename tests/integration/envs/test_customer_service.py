"""The customer-service environment in the environment service, with an agent that uses MCP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.service.agent import desk
from examples.service.env import CustomerService
from examples.service_base.clerk import Clerk
from tests.fakes import staged
from tests.integration.gateway.test_environments import finished, opened
from tests.scripted_llm import scripted_llm
from tests.service_desk import converse
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.chat import ChatAgent
from tidegate.gateway.environments.client import OwnedEnvironments
from tidegate.types import Outcome

SHOP = CustomerService()


@contextlib.asynccontextmanager
async def service(options: dict[str, Any]) -> AsyncIterator[OwnedEnvironments]:
    use = "--env.use=examples/service/env.py:CustomerService"
    environments = OwnedEnvironments([use], {"options": options})
    await environments.start()
    try:
        yield environments
    finally:
        await environments.close()


async def test_an_agent_serves_a_customer_by_mcp(tmp_path: Path) -> None:
    """The model's replies are the scripted clerk's, so that the episode ends well."""
    task = SHOP.train_task(0)
    async with (
        service({}) as environments,
        staged(make_model_dir(tmp_path / "tiny", "qwen3"), environments=environments) as stage,
    ):
        session = await opened(stage, task=task)
        for text in await replies(task):
            stage.say(text)
        await desk(task.view(), session)
        trajectory = await finished(stage, session, reward=None)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0), trajectory.messages
    assert trajectory.metrics["right_database"] == 1.0
    assert len(trajectory.turns) >= 4
    names = [call.name for call in trajectory.tool_calls]
    assert names[:2] == ["find_customer", "find_order"]
    for turn in trajectory.turns[1:]:
        assert turn.parent == turn.index - 1, "every turn extends the one before"


async def replies(task: Any) -> list[str]:
    """The clerk's replies as the model writes them."""
    _, messages = await converse(SHOP, task, Clerk().reply)
    texts = []
    for message in messages:
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            function = calls[0]["function"] if calls else None
            body = function and {"name": function["name"], "arguments": json.loads(function["arguments"])}
            texts.append(f"<tool_call>\n{json.dumps(body)}\n</tool_call>" if body else message["content"])
    return texts


async def test_an_episode_whose_user_model_fails_is_an_infra_error(tmp_path: Path) -> None:
    task = SHOP.train_task(0)
    async with scripted_llm(lambda body: {"content": ""}) as (url, requests):
        user = {"url": url, "model": "user", "attempts": 1}
        async with (
            service({"user": user}) as environments,
            staged(make_model_dir(tmp_path / "tiny", "qwen3"), environments=environments) as stage,
        ):
            stage.say("Hello.")
            session = await opened(stage, task=task)
            with pytest.raises(openai.APIError, match="gave no answer in 1 attempts"):
                await ChatAgent().run(task.view(), session)
            trajectory = await finished(stage, session, reward=None)
    assert trajectory.outcome is Outcome.INFRA_ERROR
    assert len(requests) == 1
