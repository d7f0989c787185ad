"""A program in a sandbox that can call its session of a real gateway, and nothing else."""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.fakes import staged
from tests.integration.gateway.control_stage import TASK, Sums
from tests.sandboxes import needs_bubblewrap
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.base import Session
from tidegate.agents.command import CommandAgent
from tidegate.sandbox import open_sandbox
from tidegate.types import Outcome

pytestmark = needs_bubblewrap

PROGRAM = """
import os, sys
from openai import OpenAI
question = [{"role": "user", "content": "1+2?"}]
reply = OpenAI().chat.completions.create(model=os.environ["MODEL"], messages=question)
streamed = OpenAI().chat.completions.create(
    model="any", messages=[{"role": "user", "content": sys.stdin.read()}], stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
print(reply.choices[0].message.content, text, os.getcwd(), sep="|")
"""


def packages() -> list[str]:
    """Folders from which this interpreter imports packages."""
    return [
        path for path in {*sys.path, sysconfig.get_path("purelib"), sys.prefix} if "site-packages" in path
    ]


def session(base_url: str, key: str) -> Session:
    return Session(base_url, key, "policy", None, time.monotonic() + 60)


async def test_an_agent_with_the_openai_sdk_runs_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    python = [str(Path(sys.base_prefix) / "bin" / "python3"), "-s", str(tmp_path / "agent.py")]
    agent = CommandAgent(
        python,
        {"PYTHONPATH": ":".join(packages())},
        sandbox="bubblewrap",
        read_only=packages(),
        limits={"memory_mb": 1024},
    )
    async with staged(make_model_dir(tmp_path / "tiny"), rewarders={"sums": Sums()}) as stage:
        access = await stage.client.open_session(task=TASK)
        result = await agent.run(TASK.view(), session(access.base_url, access.api_key))
        summary = await stage.client.finish(access.session_id, output=result.output)
        assert (summary.outcome, summary.turns) == (Outcome.COMPLETED, 2)
        whole, streamed, folder = str(result.output).strip().split("|")
        assert (bool(whole), bool(streamed), folder) == (True, True, "/work")


async def test_the_control_plane_cannot_be_reached(tmp_path: Path) -> None:
    async with staged(make_model_dir(tmp_path / "tiny")) as stage, await open_sandbox() as box:
        access = await stage.client.open_session(task=TASK)
        inside = await box.reach(access.base_url)
        root = inside.partition("/s/")[0]
        ask = "curl -sS --path-as-is -o /dev/null -w '%{http_code}' -H 'Authorization: Bearer KEY' URL"
        codes = {}
        for name, url in {
            "models": f"{inside}/models",
            "plain": f"{root}/v1/models",
            "control": f"{root}/health",
            "dots": f"{root}/v1/../health",
            "host": f"{stage.url}/health",
        }.items():
            codes[name] = (await box.run(ask.replace("KEY", access.api_key).replace("URL", url))).stdout
        assert codes == {"models": "200", "plain": "200", "control": "404", "dots": "404", "host": "000"}


async def test_an_agent_that_fails_or_exceeds_a_limit_is_an_agent_error() -> None:
    for command, message in (
        (["sh", "-c", "echo no >&2; exit 4"], r"status 4: no"),
        (["sh", "-c", "yes"], r"status 137 by the sandbox's limit output"),
    ):
        agent = CommandAgent(command, sandbox="bubblewrap")
        with pytest.raises(RuntimeError, match=message):
            await agent.run(TASK.view(), session("http://127.0.0.1:1/s/x/v1", "key"))


async def test_a_result_file_of_the_sandbox_is_read() -> None:
    write = (
        """printf '{"output": "42", "metrics": {"n": 1}}' > $RESULT_FILE; cat $TASK_FILE >&2; echo other"""
    )
    agent = CommandAgent(["sh", "-c", write], sandbox="bubblewrap")
    result = await agent.run(TASK.view(), session("http://127.0.0.1:1/s/x/v1", "key"))
    assert (result.output, result.metrics) == ("42", {"n": 1})
