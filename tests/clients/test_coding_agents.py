"""Coding agents on the gateway with scripted replies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.support import ENVIRONMENTS, NODE, PROGRAMS, Episode, call, scripted
from tests.clients.test_command_line import run, work
from tests.fakes import Stage

__all__ = ["work"]
pytestmark = pytest.mark.clients
BIN = NODE / ".bin"
LITELLM = ENVIRONMENTS / "agents-litellm" / "bin" / "python"
LITELLM_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise it downloads a price table
ANSWER = "The word is tide."

OPENCODE = """\
cat > opencode.json <<END
{{"model": "local/policy", "autoupdate": false, "provider": {{"local": {{
  "npm": "@ai-sdk/{provider}", "models": {{"policy": {{}}}},
  "options": {{"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"}}}}}}}}
END
{bin}/opencode run --auto {options} "$(cat)\""""


def opencode_replies(work: Path) -> list[str]:
    return [
        "I look.\n" + call("bash", command="cat notes.txt", description="Reads the notes"),
        call("write", filePath=str(work / "word.txt"), content="tide"),
        ANSWER,
    ]


async def opencode(stage: Stage, work: Path, provider: str, options: str) -> Episode:
    script = OPENCODE.format(provider=provider, bin=BIN, options=options)
    return await run(stage, work, script, {"OPENCODE_DISABLE_MODELS_FETCH": "1"})


@pytest.mark.parametrize("provider", ["openai-compatible", "openai", "anthropic"])
async def test_opencode_uses_its_tools(tmp_path: Path, work: Path, provider: str) -> None:
    """opencode uses the AI SDK's providers: Chat Completions, Responses and Messages, all streamed."""
    async with scripted(tmp_path, opencode_replies(work)) as stage:
        episode = await opencode(stage, work, provider, "--title task")
    assert ANSWER in episode.output
    assert (work / "word.txt").read_text() == "tide"
    assert "the word is tide" in str(episode.trajectory.messages)
    episode.assert_one_line(3)


async def test_opencode_asks_for_a_title(tmp_path: Path, work: Path) -> None:
    """Without a title option, opencode requests one in a separate call beside the agent's first call."""
    async with scripted(tmp_path, [ANSWER, ANSWER]) as stage:
        episode = await opencode(stage, work, "openai-compatible", "")
        requests = [stage.gateway.renderer.decode(one["input_ids"]) for one in stage.engine.requests]
    assert sum("title generator" in request for request in requests) == 1
    assert [turn.parent for turn in episode.trajectory.turns] == [None, None]
    assert [turn.branch is None for turn in episode.trajectory.turns] == [True, False]


@pytest.mark.parametrize("dialect", ["openai", "openai-responses", "anthropic"])
async def test_qwen_code_uses_its_tools(tmp_path: Path, work: Path, dialect: str) -> None:
    replies = [
        "I look.\n"
        + call("run_shell_command", command="cat notes.txt", description="Reads", is_background=False),
        call("write_file", file_path=str(work / "word.txt"), content="tide"),
        ANSWER,
    ]
    script = f'{BIN}/node {BIN}/qwen --auth-type {dialect} --model "$MODEL" --yolo "$(cat)"'
    async with scripted(tmp_path, replies) as stage:
        episode = await run(stage, work, script)
    assert ANSWER in episode.output
    assert (work / "word.txt").read_text() == "tide"
    assert "the word is tide" in str(episode.trajectory.messages)
    episode.assert_one_line(3)


def aider(provider: str, options: str) -> str:
    return f"""\
git init -q; git config user.email a@example.org; git config user.name a
{LITELLM} -m aider --model {provider}/$MODEL --edit-format diff --yes-always --map-tokens 0 \\
  --no-check-update --no-show-model-warnings --no-show-release-notes --analytics-disable {options} \\
  notes.txt --message "$(cat)\""""


def edit(before: str, after: str) -> str:
    block = f"<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE"
    return f"I change it.\n\nnotes.txt\n```\n{block}\n```\n"


@pytest.mark.parametrize("way", ["stream", "no-stream"])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_aider_corrects_an_edit_that_failed(
    tmp_path: Path, work: Path, provider: str, way: str
) -> None:
    """aider moves its rules to the newest user message, so every turn is a new root."""
    replies = [edit("the word is sea", "the word is moon"), edit("the word is tide", "the word is moon")]
    async with scripted(tmp_path, replies) as stage:
        episode = await run(stage, work, aider(provider, f"--{way} --no-auto-commits"), LITELLM_ENV)
    assert (work / "notes.txt").read_text() == "the word is moon\n"
    episode.assert_parents([None, None])
    assert "(user) differs from" in (episode.trajectory.turns[1].branch or "")


async def test_aider_asks_for_messages_of_its_commits(tmp_path: Path, work: Path) -> None:
    """aider requests two messages in separate calls: one for earlier changes, one for its own edit."""
    replies = [edit("the word is tide", "the word is moon"), "docs: Note a word", "docs: Change the word"]
    async with scripted(tmp_path, replies) as stage:
        episode = await run(stage, work, aider("openai", ""), LITELLM_ENV)
    assert "docs: Change the word" in episode.output
    assert [turn.parent for turn in episode.trajectory.turns] == [None, None, None]


MINI = f"{LITELLM} {PROGRAMS / 'mini_swe_agent.py'}"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat word.txt"


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_mini_swe_agent_uses_its_tool(tmp_path: Path, work: Path, dialect: str) -> None:
    replies = [
        "I look.\n" + call("bash", command="cat notes.txt"),
        call("bash", command="printf tide > word.txt") + "\n" + call("bash", command="ls"),
        call("bash", command=DONE),
    ]
    async with scripted(tmp_path, replies) as stage:
        episode = await run(stage, work, f"{MINI} {dialect}", LITELLM_ENV)
    assert episode.output.endswith("tide\n")
    episode.assert_one_line(3)


async def test_mini_swe_agent_with_commands_as_text(tmp_path: Path, work: Path) -> None:
    commands = ["cat notes.txt", "printf tide > word.txt", DONE]
    replies = [f"THOUGHT: I go on.\n\n```mswea_bash_command\n{command}\n```" for command in commands]
    async with scripted(tmp_path, replies) as stage:
        episode = await run(stage, work, f"{MINI} text", LITELLM_ENV)
    assert episode.output.endswith("tide\n")
    episode.assert_one_line(3)
