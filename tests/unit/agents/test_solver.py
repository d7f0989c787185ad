"""The solver, with the real SDK over HTTP against a scripted model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from tests.scripted_llm import Reply, scripted_llm, tool_call
from tidegate.agents.base import Result, Session
from tidegate.agents.solver import TOOLS, Solver
from tidegate.types import TaskView

TASK = TaskView("t", [{"role": "user", "content": "12 apples and 5 pears?"}])


async def solve(replies: Iterable[Reply], solver: Solver | None = None) -> tuple[Result, list[Any]]:
    script = iter(replies)
    async with scripted_llm(lambda _: next(script)) as (url, requests):
        session = Session(url, "key", "policy", None, time.monotonic() + 30)
        return await (solver or Solver()).run(TASK, session), requests


async def test_it_calls_the_calculator_and_answers() -> None:
    result, requests = await solve(
        [tool_call("calculator", {"expression": "12 + 5"}), {"content": "#### 17"}]
    )
    assert result == Result("#### 17", None, {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0})
    assert requests[0]["messages"] == TASK.messages
    assert requests[0]["tools"] == TOOLS
    assert requests[0]["model"] == "policy"
    user, call, answer = requests[1]["messages"]
    assert user == TASK.messages[0]
    assert call["tool_calls"][0]["function"]["name"] == "calculator"
    assert answer == {"role": "tool", "tool_call_id": "call_1", "content": "17"}


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("calculator", {"expression": "1 / 0"}, "error: division by zero"),
        ("calculator", {"expression": "1 +"}, "error: the expression ends too early"),
        ("calculator", {"expression": 5}, "5"),
        ("calculator", {"formula": "1"}, "error: the arguments must be"),
        ("calculator", "not json", "error: the arguments must be"),
        ("calculator", "[1]", "error: the arguments must be"),
        ("calculator", "[" * 5000, "error: the arguments must be"),
        ("abacus", {"expression": "1"}, "error: there is no such tool"),
    ],
)
async def test_what_is_wrong_with_a_call_goes_back_to_the_model(name: str, arguments: Any, text: str) -> None:
    result, requests = await solve([tool_call(name, arguments), {"content": "#### 0"}])
    assert requests[1]["messages"][-1]["content"].startswith(text)
    assert result.metrics["tool_errors"] == float(text.startswith("error"))
    assert result.output == "#### 0"


async def test_several_calls_in_one_reply_are_all_answered() -> None:
    both = tool_call("calculator", {"expression": "1 + 1"}, "a")
    both["tool_calls"] += tool_call("calculator", {"expression": "2 + 2"}, "b")["tool_calls"]
    result, requests = await solve([both, {"content": "#### 4"}])
    answers = [(one["tool_call_id"], one["content"]) for one in requests[1]["messages"][2:]]
    assert answers == [("a", "2"), ("b", "4")]
    assert result.metrics["tool_calls"] == 2.0


async def test_a_model_that_never_answers_is_stopped() -> None:
    calls = [tool_call("calculator", {"expression": "1"})] * 9
    result, requests = await solve(calls, Solver(max_turns=3))
    assert len(requests) == 3
    assert result.output is None


async def test_instructions_come_first() -> None:
    _, requests = await solve([{"content": "#### 1"}], Solver(instructions="End with #### number."))
    assert requests[0]["messages"][0] == {"role": "system", "content": "End with #### number."}
    assert TASK.messages == [{"role": "user", "content": "12 apples and 5 pears?"}]
