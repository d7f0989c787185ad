"""Clients with typed replies: DSPy writes its own prompts, instructor requires a tool call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.support import PROGRAMS, QUESTION, python, run_client, scripted
from tidegate.types import Sampling, Task

pytestmark = pytest.mark.clients
ENVIRONMENT = "frameworks-openai2"
SUM = Task("sum", "", [{"role": "user", "content": QUESTION}])
SAMPLING = Sampling(1.0, max_tokens=1000)


def fields(**values: str) -> str:
    """A reply in the format of DSPy's ChatAdapter."""
    written = [f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()]
    return "\n\n".join([*written, "[[ ## completed ## ]]"])


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_every_step_of_dspy_is_a_prompt_of_its_own(tmp_path: Path, dialect: str) -> None:
    """DSPy's ReAct writes all earlier steps into one user message."""
    replies = [
        fields(
            next_thought="I add.",
            next_tool_name="calculator",
            next_tool_args='{"expression": "10 * 5 + 6 * 15"}',
        ),
        fields(next_thought="It is known.", next_tool_name="finish", next_tool_args="{}"),
        fields(reasoning="I added.", answer="#### 140"),
    ]
    program = str(PROGRAMS / "dspy_agent.py")
    async with scripted(tmp_path, replies) as stage:
        command = [python(ENVIRONMENT), program, dialect]
        episode = await run_client(stage.client, command, task=SUM, sampling=SAMPLING)
    assert episode.saw["answers"] == ["#### 140"]
    assert episode.saw["calls"] == ["10 * 5 + 6 * 15"]
    episode.assert_parents([None, None, None])


async def test_dspy_asks_for_json_after_a_reply_that_it_cannot_parse(tmp_path: Path) -> None:
    """Also in training sessions, where the reply is sampled as free text."""
    step = {"next_thought": "I add.", "next_tool_name": "finish", "next_tool_args": {}}
    replies = ["I do not know.", json.dumps(step), fields(reasoning="I added.", answer="#### 140")]
    command = [python(ENVIRONMENT), str(PROGRAMS / "dspy_agent.py"), "chat"]
    async with scripted(tmp_path, replies) as stage:
        episode = await run_client(stage.client, command, task=SUM, sampling=SAMPLING)
    assert episode.saw["answers"] == ["#### 140"]
    episode.assert_parents([None, None, None])


def rest(total: int) -> str:
    """The rest of a tool call whose beginning ends the prompt."""
    return f' {{"total": {total}}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("dialect", "parents"), [("chat", [None, 0]), ("responses", [None, None]), ("messages", [None, 0])]
)
async def test_instructor_asks_again(tmp_path: Path, dialect: str, parents: list[int | None]) -> None:
    """With Responses, instructor quotes the error and omits the invalid call."""
    program = str(PROGRAMS / "instructor_reply.py")
    async with scripted(tmp_path, [rest(50), rest(140)]) as stage:
        episode = await run_client(stage.client, [python(ENVIRONMENT), program, dialect, "whole"], task=SUM)
    assert episode.saw["answers"] == ["140"]
    assert episode.saw["calls"] == ["50", "140"]
    assert [turn.parse for turn in episode.trajectory.turns] == ["ok", "ok"]
    episode.assert_parents(parents)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_instructor_reads_a_reply_as_it_grows(tmp_path: Path, dialect: str) -> None:
    program = str(PROGRAMS / "instructor_reply.py")
    async with scripted(tmp_path, [rest(140)]) as stage:
        episode = await run_client(stage.client, [python(ENVIRONMENT), program, dialect, "stream"], task=SUM)
    assert episode.saw["answers"] == ["140"]
    episode.assert_one_line(1)
