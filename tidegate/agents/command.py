"""Any program as an agent: it is told by environment variables where the model is and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.errors import ConfigError
from tidegate.types import TaskView

MAX_STDOUT = 1_000_000
"""Bytes of stdout that are kept, the last ones: a program that talks without end does no harm."""
STDERR_SHOWN = 1_000


class CommandAgent(Agent):
    """Runs a command for every task: `CommandAgent(["node", "agent.js"])`.

    The program finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and MODEL
    in its environment. TASK_FILE is JSON: `{"id", "messages"}`; the last message's text also comes on
    stdin. The output is what it writes to RESULT_FILE (JSON `{"output", "reward"?, "metrics"?}`), or
    else its stdout. An exit status other than 0 ends the run as `agent_error`.

    It runs in a process group of its own in an empty directory, both of which end with the run.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ConfigError(
                f"the command must be a list of words, such as ['node', 'agent.js'], not {command!r}"
            )
        # A program named by a relative path is meant from here, not from the run's directory.
        self.command = [str(Path(word).resolve()) if Path(word).is_file() else word for word in command]
        self.env = dict(env or {})

    async def run(self, task: TaskView, session: Session) -> Result:
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            result_file = Path(folder, "result.json")
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env=self._environment(session, _write_task(folder, task), result_file),
                process_group=0,
            )
            try:
                stdout, stderr = await _talk(process, _prompt(task))
            finally:
                # Whoever is left of the group is ended, also after a good end.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if process.returncode != 0:
                raise RuntimeError(
                    f"{self.command[0]} ended with status {process.returncode}: {stderr[-STDERR_SHOWN:]}"
                )
            return _read_result(result_file, stdout)

    def _environment(self, session: Session, task_file: Path, result_file: Path) -> dict[str, str]:
        return {
            **os.environ,
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            # Anthropic's clients add /v1 themselves.
            "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": session.api_key,
            "MODEL": session.model,
            "SEED": str(session.seed if session.seed is not None else 0),
            "TASK_FILE": str(task_file),
            "RESULT_FILE": str(result_file),
            **self.env,
        }


def _write_task(folder: str, task: TaskView) -> Path:
    file = Path(folder, "task.json")
    file.write_text(json.dumps({"id": task.id, "messages": list(task.messages)}), encoding="utf-8")
    return file


def _prompt(task: TaskView) -> bytes:
    content = task.messages[-1].get("content") if task.messages else ""
    return (content if isinstance(content, str) else json.dumps(content)).encode()


async def _talk(process: asyncio.subprocess.Process, prompt: bytes) -> tuple[str, str]:
    """Give the prompt; collect the ends of stdout and stderr until the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = asyncio.gather(_tail(process.stdout), _tail(process.stderr))
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read it
            process.stdin.write(prompt)
            await process.stdin.drain()
        process.stdin.close()
        await process.wait()
        with contextlib.suppress(ProcessLookupError):  # a child left behind would keep the pipes open
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = await outputs
    finally:
        outputs.cancel()
    return stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while piece := await stream.read(65536):
        kept += piece
        if len(kept) > 2 * MAX_STDOUT:
            del kept[:-MAX_STDOUT]
    return bytes(kept[-MAX_STDOUT:])


def _read_result(file: Path, stdout: str) -> Result:
    if not file.exists():
        return Result(stdout)
    try:
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return Result(said["output"], said.get("reward"), said.get("metrics") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"RESULT_FILE: {error!r}", file=sys.stderr)
        raise ValueError(
            'RESULT_FILE is not JSON of the form {"output": ..., "reward"?, "metrics"?}'
        ) from error
