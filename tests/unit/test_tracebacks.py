"""In messages about an error, the line of the user's own code comes first."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate.envs.rewards import Reward
from tidegate.errors import RewardError
from tidegate.loading import load_object
from tidegate.tracebacks import HERE, FailureReasons, describe_error, own_frames, where

MINE = """
import asyncio
import json
from openai import AsyncOpenAI

async def call(session):
    llm = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    return await llm.chat.completions.create(model="policy", messages=[])

async def together(session):
    async with asyncio.TaskGroup() as group:
        group.create_task(call(session))

async def decode(session):
    return json.loads("{" * 400)

async def leaves(session):
    try:
        return json.loads("{")
    except ValueError:
        raise SystemExit("x" * 5000) from None

def correct(output):
    return output["answer"]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], Any]:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return lambda name: load_object(f"{file}:{name}", {}, "agent")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("call", "in call: return await llm.chat.completions.create("),
        ("together", "in call: return await llm.chat.completions.create("),
        ("decode", 'in decode: return json.loads("{" * 400)'),
        ("leaves", 'in leaves: raise SystemExit("x" * 5000) from None'),
    ],
)
def test_the_users_line_is_among_the_first_characters(
    mine: Callable[[str], Any], name: str, line: str
) -> None:
    with pytest.raises(BaseException) as caught:
        asyncio.run(mine(name)(None))
    text = describe_error(caught.value, 2000)
    at = text.index("mine.py:")
    assert at < 400, text
    assert line in text[at:].partition("\n")[0]
    assert len(text) < 7000


def test_a_reward_that_raises_says_where(mine: Callable[[str], Any]) -> None:
    line = 1 + MINE.splitlines().index('    return output["answer"]')
    with pytest.raises(RewardError, match=rf"raised TypeError: .* \(.*mine\.py:{line}, in correct\)"):
        Reward("correct", mine("correct"))({"output": "text"})


def test_of_an_error_in_libraries_alone_the_last_frames_are_shown() -> None:
    error = ValueError("no frames at all")
    assert (own_frames(error), where(error), describe_error(error, 99)) == (
        [],
        "",
        "ValueError: no frames at all",
    )


def test_failures_that_differ_in_paths_and_numbers_are_counted_together(tmp_path: Path) -> None:
    reasons = FailureReasons()
    for number in range(40):
        path = f"{tempfile.gettempdir()}/agent-{number:x}k_q"
        reasons.count(
            f"agent_error: RuntimeError: node exited with status 1: node:internal/modules/cjs:{number}\n"
            f"Error: Cannot find module '{path}/agent.js'"
        )
    reasons.count("agent_error: another")
    (text, number), (other, once) = reasons.most_common()
    assert (number, once, other) == (40, 1, "agent_error: another")
    assert "agent-0k_q/agent.js" in text
    reasons = FailureReasons()
    ours = f'  File "{HERE}/agents/command.py", line 7, in run\n    raise RuntimeError(\n    ^^^^'
    reasons.count(
        f'agent_error: it failed\n  agent.py:3, in run: x()\n{ours}\n  File "agent.py", line 3, in run'
    )
    assert reasons.most_common() == [
        ('agent_error: it failed\n  agent.py:3, in run: x()\n  File "agent.py", line 3, in run', 1)
    ]
