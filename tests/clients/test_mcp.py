"""Unchanged MCP clients use the tools of an episode's environment; the replies are scripted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.clients.support import NODE, PROGRAMS, Episode, call, python, run_client, scripted
from tests.clients.test_command_line import CODEX_SETTINGS, work
from tests.environments import TASK, LocalEnvironments, Safe
from tests.fakes import Stage
from tidegate.types import Sampling

__all__ = ["work"]
pytestmark = pytest.mark.clients
BIN = NODE / ".bin"
SAMPLING = Sampling(1.0, max_tokens=4000)
ANSWER = "The safe is open."
DIGITS = [4, 11, 7]
RESULTS = [("closed", False), ("11 is not a digit", True), ("open", False)]


def replies(tool: str) -> list[str]:
    return [*(call(tool, digit=digit) for digit in DIGITS), ANSWER]


async def run(stage: Stage, command: list[str], home: Path | None = None) -> Episode:
    env = {} if home is None else {"HOME": str(home), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return await run_client(stage.client, command, task=TASK, env=env, sampling=SAMPLING)


def assert_recorded(episode: Episode) -> None:
    calls = episode.trajectory.tool_calls
    assert [one.arguments for one in calls] == [{"digit": digit} for digit in DIGITS]
    assert [(one.result, one.error) for one in calls] == RESULTS


def assert_used(episode: Episode) -> None:
    """The agent called the tools between its turns, and the model read the results."""
    assert_recorded(episode)
    assert [one.turn for one in episode.trajectory.tool_calls] == [0, 1, 2]
    messages = [one for one in episode.trajectory.messages if one["role"] == "tool"]
    assert len(messages) == len(RESULTS)
    for message, (text, _) in zip(messages, RESULTS, strict=True):
        assert text in str(message["content"])
    episode.assert_one_line(4)


@pytest.mark.parametrize("line", [1, 2])
async def test_the_official_client(tmp_path: Path, line: int) -> None:
    interpreter = python("mcp1") if line == 1 else sys.executable
    calls = json.dumps([["enter", {"digit": digit}] for digit in DIGITS])
    async with scripted(tmp_path, [], environments=LocalEnvironments(Safe())) as stage:
        episode = await run(stage, [interpreter, str(PROGRAMS / "mcp_client.py"), calls])
    assert episode.saw["version"].startswith(f"{line}.")
    assert episode.saw["tools"] == ["enter", "read"]
    assert episode.saw["answers"] == [list(result) for result in RESULTS]
    assert_recorded(episode)


@pytest.mark.parametrize("program", ["agents_sdk_mcp.py", "langgraph_mcp.py"])
async def test_a_framework(tmp_path: Path, program: str) -> None:
    async with scripted(tmp_path, replies("enter"), environments=LocalEnvironments(Safe())) as stage:
        episode = await run(stage, [python("frameworks"), str(PROGRAMS / program)])
    assert episode.saw["answer"] == ANSWER
    assert_used(episode)


CLAUDE = """\
cat > mcp.json <<END
{"mcpServers": {"env": {"type": "http", "url": "$TIDEGATE_MCP_URL",
  "headers": {"Authorization": "Bearer $OPENAI_API_KEY"}}}}
END
"""


async def test_claude_code(tmp_path: Path, work: Path) -> None:
    options = '--model "$MODEL" --output-format json --mcp-config mcp.json --allowedTools mcp__env__enter --'
    script = f'cd {work}\n{CLAUDE}{BIN}/claude --print {options} "$(cat)"'
    async with scripted(
        tmp_path, replies("mcp__env__enter"), environments=LocalEnvironments(Safe())
    ) as stage:
        episode = await run(stage, ["bash", "-euc", script], work.parent / "home")
    assert episode.saw["result"] == ANSWER
    assert_used(episode)


CODEX = f"""\
export CODEX_HOME="$HOME/.codex"; mkdir "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<END
{CODEX_SETTINGS}
[mcp_servers.env]
url = "$TIDEGATE_MCP_URL"
bearer_token_env_var = "OPENAI_API_KEY"
END
{BIN}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json
"""


async def test_codex(tmp_path: Path, work: Path) -> None:
    async with scripted(tmp_path, replies("mcp__env.enter"), environments=LocalEnvironments(Safe())) as stage:
        episode = await run(stage, ["bash", "-euc", f"cd {work}\n{CODEX}"], work.parent / "home")
    said = [json.loads(line) for line in episode.output.splitlines()]
    assert ANSWER in str(said)
    assert_used(episode)
