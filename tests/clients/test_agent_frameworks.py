"""Agent frameworks on the gateway: thoughts, text beside a call, parallel calls, then another question.

The replies are scripted, because the bundled model writes neither thoughts nor parallel calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.clients.support import (
    PROGRAMS,
    QUESTION,
    WideEngine,
    call,
    python,
    run_both_ways,
    scripted,
)
from tests.fakes import Stage
from tidegate.types import Sampling, Task

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="module")]
OPENAI2, OPENAI3 = "frameworks-openai2", "frameworks-openai3"
SUM = Task("sum", "", [{"role": "user", "content": QUESTION}])
SAMPLING = Sampling(1.0, max_tokens=1000)
EXPRESSIONS = ["10 * 5", "6 * 15", "50 + 90"]
TOOLS = ["calculator", "Sums-calculator"]
"""Names of the tool; Semantic Kernel prefixes its plugin's name."""
LINE = [None, 0, 1, 2]
REWRITTEN = [None, None, 1, 2]
"""The client edits the first reply: it drops the text beside the call, or replaces it by the thoughts."""

CASES = [
    (OPENAI3, "agent_framework_agent.py", "chat", LINE, LINE),
    (OPENAI3, "agent_framework_agent.py", "responses", LINE, LINE),
    (OPENAI3, "agent_framework_agent.py", "messages", LINE, LINE),
    (OPENAI3, "agno_agent.py", "chat", LINE, LINE),
    (OPENAI3, "agno_agent.py", "responses", REWRITTEN, REWRITTEN),
    (OPENAI3, "agno_agent.py", "messages", LINE, LINE),
    (OPENAI2, "autogen_agent.py", "chat", LINE, LINE),
    (OPENAI2, "autogen_agent.py", "messages", REWRITTEN, REWRITTEN),
    (OPENAI2, "adk_agent.py", "chat", LINE, LINE),
    (OPENAI2, "adk_agent.py", "messages", LINE, LINE),
    (OPENAI3, "haystack_agent.py", "chat", LINE, LINE),
    (OPENAI3, "haystack_agent.py", "responses", LINE, LINE),
    (OPENAI3, "haystack_agent.py", "messages", REWRITTEN, LINE),
    (OPENAI2, "litellm_agent.py", "chat", LINE, LINE),
    (OPENAI2, "litellm_agent.py", "responses", LINE, LINE),
    (OPENAI2, "litellm_agent.py", "messages", LINE, [None, 0, 0, 2]),
    (OPENAI2, "llamaindex_agent.py", "chat", LINE, LINE),
    (OPENAI2, "llamaindex_agent.py", "responses", LINE, LINE),
    (OPENAI2, "llamaindex_agent.py", "messages", LINE, LINE),
    (OPENAI3, "pydantic_ai_agent.py", "chat", LINE, LINE),
    (OPENAI3, "pydantic_ai_agent.py", "responses", LINE, LINE),
    (OPENAI3, "pydantic_ai_agent.py", "messages", LINE, LINE),
    (OPENAI3, "semantic_kernel_agent.py", "chat", REWRITTEN, [None, None, 1, 1]),
    (OPENAI3, "semantic_kernel_agent.py", "messages", LINE, [None, 0, 1, 1]),
    (OPENAI2, "strands_agent.py", "chat", LINE, LINE),
    (OPENAI2, "strands_agent.py", "responses", LINE, LINE),
    (OPENAI2, "strands_agent.py", "messages", LINE, LINE),
]
"""Environment, program, dialect, and the parents of the turns for whole and for streamed replies."""


def replies(tool: str) -> list[str]:
    first, *others = (call(tool, expression=expression) for expression in EXPRESSIONS)
    return [
        f"<think>\nTwo products.\n</think>\n\nI begin with the stamps.\n{first}",
        "\n".join(others),
        "<think>\nAll is known.\n</think>\n\n#### 140",
        "Yes, it is.",
    ]


@dataclass
class TurnEngine(WideEngine):
    """Chooses the reply by the number of replies in the prompt, so that sessions may run in parallel."""

    def output_for(self, prompt: Sequence[int], limit: int) -> list[int]:
        text = self.decode(prompt)
        tool = next(index for index, name in enumerate(TOOLS) if f'"name": "{name}"' in text)
        turn = text.count("\nassistant\n") - 1
        return self.replies[4 * tool + turn][:limit]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    script = [reply for tool in TOOLS for reply in replies(tool)]
    async with scripted(tmp_path_factory.mktemp("stage"), script, TurnEngine) as made:
        yield made


@pytest.mark.parametrize(
    ("environment", "program", "dialect", "whole", "streamed"),
    CASES,
    ids=[f"{case[1].removesuffix('.py')}-{case[2]}" for case in CASES],
)
async def test_an_agent_framework_calls_tools_over_two_questions(
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
        first, second = episode.saw["answers"]
        assert first.endswith("#### 140")
        assert second.endswith("Yes, it is.")
        assert episode.saw["calls"][0] == EXPRESSIONS[0]
        assert sorted(episode.saw["calls"][1:]) == sorted(EXPRESSIONS[1:])  # they may run at the same time
        assert [turn.parse for turn in episode.trajectory.turns] == ["ok", "ok", None, None]
        episode.assert_parents(parents)
