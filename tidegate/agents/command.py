"""Any program as an agent: it is told by environment variables where the model is and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import signal
import stat
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

    It runs in a process group of its own, in an empty directory, both of which end with the run. With `user`
    (a name or an id; needs root) it runs as that user: then it can read neither the run's files nor what
    belongs to the trainer's user.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, user: str | int | None = None
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ConfigError(
                f"the command must be a list of words, such as ['node', 'agent.js'], not {command!r}"
            )
        # A program named by a relative path is meant from here, not from the run's directory.
        self.command = [os.path.abspath(word) if os.path.isfile(word) else word for word in command]
        self.env = dict(env or {})
        self.user = None if user is None else _user(user)

    async def run(self, task: TaskView, session: Session) -> Result:
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            result_file = Path(folder, "result.json")
            if self.user is not None:
                os.chown(folder, self.user.pw_uid, self.user.pw_gid)
            environment = self._environment(session, self._write_task(folder, task), result_file)
            transport, program = await asyncio.get_running_loop().subprocess_exec(
                _Program,
                *self.command,
                cwd=folder,
                env=environment,
                start_new_session=True,
                **self._as_user(),
            )
            try:
                await program.talk(_prompt(task))
            finally:
                program.kill_group()
                transport.close()
            if transport.get_returncode() != 0:
                said = program.said(2)[-STDERR_SHOWN:]
                raise RuntimeError(
                    f"{self.command[0]} ended with status {transport.get_returncode()}: {said}"
                )
            return _read_result(result_file, program.said(1))

    def _as_user(self) -> dict[str, Any]:
        """What the program is started with so that it has that user's rights and no others."""
        if self.user is None:
            return {}
        return {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}

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
            **({} if self.user is None else {"HOME": self.user.pw_dir, "USER": self.user.pw_name}),
            **self.env,
        }

    def _write_task(self, folder: str, task: TaskView) -> Path:
        file = Path(folder, "task.json")
        file.write_text(json.dumps({"id": task.id, "messages": list(task.messages)}), encoding="utf-8")
        if self.user is not None:
            os.chown(file, self.user.pw_uid, self.user.pw_gid)
        return file


def _user(user: str | int) -> pwd.struct_passwd:
    """Raises ConfigError where there is no such user, or it takes rights that this process does not have."""
    try:
        found = pwd.getpwnam(user) if isinstance(user, str) else pwd.getpwuid(user)
    except KeyError:
        raise ConfigError(f"agent.options.user = {user!r}: there is no such user on this machine") from None
    if os.geteuid() not in (0, found.pw_uid):
        raise ConfigError(
            f"agent.options.user = {user!r}: only root can run a program as another user; start the run as "
            "root, or leave the option out"
        )
    return found


def _prompt(task: TaskView) -> bytes:
    content = task.messages[-1].get("content") if task.messages else ""
    return (content if isinstance(content, str) else json.dumps(content)).encode()


class _Program(asyncio.SubprocessProtocol):
    """A running program: keeps the ends of what it says, and learns of its exit.

    asyncio's streams would wait for the pipes too, which a child that was left behind keeps open.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._killed = False
        self._said = {1: bytearray(), 2: bytearray()}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self._said[fd]
        kept += data
        if len(kept) > 2 * MAX_STDOUT:
            del kept[:-MAX_STDOUT]

    def process_exited(self) -> None:
        if not self._exited.done():
            self._exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    async def talk(self, prompt: bytes) -> None:
        """Give it the prompt, which it need not read, and wait until it and its children have ended."""
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(prompt)
        stdin.close()
        await self._exited
        self.kill_group()
        await self._closed

    def kill_group(self) -> None:
        """End whoever is left of the group; once, since its id is another's some day."""
        if self._killed:
            return
        self._killed = self._exited.done()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def said(self, fd: int) -> str:
        return self._said[fd][-MAX_STDOUT:].decode("utf-8", "replace")


def _own_text(file: Path) -> bytes:
    """A file that the program wrote; no link to somebody else's, and no pipe that would be waited for."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        about, folder = os.fstat(opened.fileno()), file.parent.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != folder.st_uid:
            raise ValueError("RESULT_FILE is no file of the program's own")
        return opened.read()


def _read_result(file: Path, stdout: str) -> Result:
    try:
        text = _own_text(file)
    except FileNotFoundError:
        return Result(stdout)
    try:
        said: dict[str, Any] = json.loads(text)
        return Result(said["output"], said.get("reward"), said.get("metrics") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"RESULT_FILE: {error!r}", file=sys.stderr)
        raise ValueError(
            'RESULT_FILE is not JSON of the form {"output": ..., "reward"?, "metrics"?}'
        ) from error
