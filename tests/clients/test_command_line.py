"""Command-line agents from npm, on the gateway with scripted replies.

The replies are scripted because no tiny model can use these agents' tools. Their requests, their handling of
the replies and the gateway's record are real.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.support import NODE, Episode, call, run_client, scripted
from tests.fakes import FakeEngine, Stage
from tidegate.types import Sampling, Task

pytestmark = pytest.mark.clients
QUESTION = "Which word is in notes.txt?"
TASK = Task("word", "", [{"role": "user", "content": QUESTION}])
BIN = NODE / ".bin"
CODEX_SETTINGS = """\
model = "policy"
model_provider = "tidegate"
web_search = "disabled"
[model_providers.tidegate]
name = "tidegate"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The agent's working directory; its home is beside it."""
    made = tmp_path / "work"
    made.mkdir()
    (tmp_path / "home").mkdir()
    (made / "notes.txt").write_text("the word is tide\n")
    return made


async def run(stage: Stage, work: Path, script: str, env: Mapping[str, str] | None = None) -> Episode:
    """A shell script that runs as the agent in that directory."""
    return await run_client(
        stage.client,
        ["bash", "-euc", f"cd {work}\n{script}"],
        task=TASK,
        env={"HOME": str(work.parent / "home"), **(env or {})},
        sampling=Sampling(1.0, max_tokens=4000),
    )


CLAUDE = f'{BIN}/claude --print --model "$MODEL" --output-format json --allowedTools Bash,Write,Agent'
CODEX = f"""
export CODEX_HOME="$HOME/.codex"; mkdir "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<END
{CODEX_SETTINGS}END
{BIN}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json"""


async def claude(stage: Stage, work: Path, then: str = "") -> Episode:
    env = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return await run(stage, work, CLAUDE + then, env)


async def codex(stage: Stage, work: Path, then: str = "") -> Episode:
    return await run(stage, work, CODEX + then)


async def test_claude_code_uses_its_tools(tmp_path: Path, work: Path) -> None:
    replies = [
        "I look.\n" + call("Bash", command="cat notes.txt", description="Reads the notes"),
        call("Write", file_path=str(work / "word.txt"), content="tide"),
        "The word is tide.",
    ]
    async with scripted(tmp_path, replies) as stage:
        episode = await claude(stage, work)
    assert episode.saw["result"] == "The word is tide."
    assert (work / "word.txt").read_text() == "tide"
    assert "the word is tide" in str(episode.trajectory.messages)
    episode.assert_one_line(3)


async def test_a_sub_agent_of_claude_code_is_a_branch(tmp_path: Path, work: Path) -> None:
    """The sub-agent has its own prompts and tools; the calling agent then continues its sequence."""
    replies = [
        call("Agent", description="reads", prompt="Read it.", subagent_type="general-purpose",
             run_in_background=False),
        call("Bash", command="cat notes.txt", description="Reads the notes"),
        "It is tide.",
        "The word is tide.",
    ]  # fmt: skip
    async with scripted(tmp_path, replies) as stage:
        episode = await claude(stage, work)
    assert episode.saw["result"] == "The word is tide."
    turns = episode.trajectory.turns
    assert [turn.parent for turn in turns] == [None, None, 1, 0]
    assert [turn.branch is not None for turn in turns] == [False, True, False, True]
    assert all(turn.delivered for turn in turns)


async def test_codex_uses_its_tools(tmp_path: Path, work: Path) -> None:
    replies = [
        "I look.\n" + call("exec_command", cmd="cat notes.txt"),
        # A tool in a namespace; Codex itself refuses the call, because no such agent exists.
        call("multi_agent_v1.close_agent", target="01a1fed3-0c55-7171-ab48-487028c72b1a"),
        call("exec_command", cmd="printf tide > word.txt"),
        "The word is tide.",
    ]
    async with scripted(tmp_path, replies) as stage:
        episode = await codex(stage, work)
    events = [json.loads(line) for line in episode.output.splitlines()]
    said = [event["item"] for event in events if event["type"] == "item.completed"]
    assert said[-1] == {"id": said[-1]["id"], "type": "agent_message", "text": "The word is tide."}
    assert (work / "word.txt").read_text() == "tide"
    results = [message["content"] for message in episode.trajectory.messages if message["role"] == "tool"]
    assert len(results) == 3
    assert "the word is tide" in results[0]
    assert "close_agent" not in results[1]
    episode.assert_one_line(4)


async def test_both_know_what_a_prompt_that_does_not_fit_is(tmp_path: Path, work: Path) -> None:
    async with scripted(tmp_path, [], FakeEngine) as stage:
        episode = await claude(stage, work, " || true")
        assert episode.saw["terminal_reason"] == "prompt_too_long"
        episode = await codex(stage, work, " || true")
        assert "ran out of room in the model's context window" in episode.output
        assert stage.engine.requests == []
