"""Python agents on the gateway: thoughts, text beside a call, parallel calls, the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.support import PROGRAMS, python, run_both_ways, run_client, scripted
from tests.clients.test_agent_frameworks import EXPRESSIONS, SAMPLING, SUM, replies, stage
from tests.fakes import Stage

__all__ = ["stage"]
pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="module")]
OPENAI2, OPENAI3 = "agents-openai2", "agents-openai3"
LINE = [None, 0, 1]
REWRITTEN = [None, None, 1]
"""The client drops the text beside the call of the first reply."""

CASES = [
    (OPENAI2, "camel_agent.py", "chat", LINE, REWRITTEN),
    (OPENAI2, "camel_agent.py", "messages", LINE, REWRITTEN),
    (OPENAI2, "crewai_agent.py", "chat", REWRITTEN, REWRITTEN),
    (OPENAI2, "crewai_agent.py", "messages", REWRITTEN, REWRITTEN),
    (OPENAI3, "deepagents_agent.py", "chat", LINE, LINE),
    (OPENAI3, "deepagents_agent.py", "responses", LINE, LINE),
    (OPENAI3, "deepagents_agent.py", "messages", LINE, LINE),
    (OPENAI3, "inspect_agent.py", "chat", LINE, LINE),
    (OPENAI3, "inspect_agent.py", "compatible", LINE, LINE),
    (OPENAI3, "inspect_agent.py", "responses", LINE, LINE),
    (OPENAI3, "inspect_agent.py", "messages", LINE, LINE),
    (OPENAI3, "qwen_agent_assistant.py", "chat", LINE, LINE),
    (OPENAI3, "qwen_agent_assistant.py", "text", LINE, LINE),
]
"""Environment, program, dialect, and the parents of the turns for whole and for streamed replies."""


@pytest.mark.parametrize(
    ("environment", "program", "dialect", "whole", "streamed"),
    CASES,
    ids=[f"{case[1].removesuffix('.py')}-{case[2]}" for case in CASES],
)
async def test_an_agent_calls_tools(
    stage: Stage,
    environment: str,
    program: str,
    dialect: str,
    whole: list[int | None],
    streamed: list[int | None],
) -> None:
    command = [python(environment), str(PROGRAMS / program), dialect]
    episodes = await run_both_ways(stage.client, command, task=SUM, sampling=SAMPLING)
    for episode, parents in zip(episodes, (whole, streamed), strict=True):
        [answer] = episode.saw["answers"]
        assert answer.endswith("#### 140")
        assert sorted(episode.saw["calls"]) == sorted(EXPRESSIONS), "parallel calls may run in any order"
        episode.assert_parents(parents)


async def test_crewai_ends_with_a_text_that_is_streamed_beside_a_call(stage: Stage) -> None:
    """With streamed Responses, the client takes the text as the answer and drops the call; else the text."""
    command = [python(OPENAI2), str(PROGRAMS / "crewai_agent.py"), "responses"]
    whole = await run_client(stage.client, [*command, "whole"], task=SUM, sampling=SAMPLING)
    assert whole.saw["answers"] == ["#### 140"]
    whole.assert_parents(REWRITTEN)
    streamed = await run_client(stage.client, [*command, "stream"], task=SUM, sampling=SAMPLING)
    assert streamed.saw["answers"] == ["I begin with the stamps."]
    assert streamed.saw["calls"] == []
    streamed.assert_one_line(1)


async def test_camel_repeats_the_response_that_it_continues(tmp_path: Path) -> None:
    """The client sends `previous_response_id` and repeats the items: the prompt has the call twice."""
    command = [python(OPENAI2), str(PROGRAMS / "camel_agent.py"), "responses", "whole"]
    first, _, answer, _ = replies("calculator")
    async with scripted(tmp_path, [first, answer]) as stage:
        episode = await run_client(stage.client, command, task=SUM, sampling=SAMPLING)
    episode.assert_one_line(2)
    repeated = episode.trajectory.messages[-3]
    assert repeated["content"] == "I begin with the stamps."
    assert len(repeated["tool_calls"]) == 1
