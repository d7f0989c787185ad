"""The built-in agent `command`: runs a program, which gets the endpoint and the task in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pwd
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.sandbox import Sandbox, SandboxLimits, open_sandbox
from tidegate.types import TaskView

MAX_STDOUT = 1_000_000
"""Last bytes of each output stream that are kept."""
MAX_RESULT = 8_000_000
"""Most bytes of RESULT_FILE: those of the longest output in JSON."""
OUTPUT_BYTES = 1_000_000
"""Bytes kept of each output of a program in a sandbox."""
STDERR_SHOWN = 1_000
"""Last characters of stderr in an error."""
INTERPRETER = re.compile(
    r"(python|pypy|ruby|perl|php|lua|Rscript|julia|(ba|da|z|k)?sh|node|nodejs|deno|bun|npx|tsx|ts-node|uv)[\d.]*"
)
SCRIPT = re.compile(r".+\.([cm]?[jt]sx?|pyc?|rb|pl|php|lua|[rR]|jl|(ba|z|k)?sh)")
UNCHECKED = re.compile(r"-\w*[cempr]|--(eval|print|require|import|directory|cwd)(=.*)?|\w+://.*")
"""Options of interpreters, after which a word may name program text, a module or a file of another directory;
and a script's URL."""


class CommandAgent(Agent):
    """Runs a command for every task: `CommandAgent(["node", "./agent.js"])`.

    The program's environment contains OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY,
    TIDEGATE_MCP_URL (an MCP server with the environment's tools, opened by the API key as bearer token),
    MODEL, SEED, TASK_FILE and RESULT_FILE. TASK_FILE is JSON: `{"id", "messages"}`; stdin has the text of the
    last message. The output is the content of RESULT_FILE (JSON `{"output", "reward"?, "metrics"?}`) if the
    program writes it, else its stdout. An exit status other than 0 ends the episode as `agent_error`.

    The program runs in its own process group and in an empty directory, both of which are removed afterwards.
    With `sandbox` it runs in a sandbox instead, from which it can call its session and nothing else; its
    environment then has nothing of this process's.

    Args:
        command: The program and its arguments. Words that name files of the current directory, such as
            ["node", "agent.js"], become absolute paths; other words are passed unchanged.
        env: Further environment variables.
        user: Name or id of the user to run it as (needs root). It then can read neither the run's files nor
            those of the trainer's user.
        sandbox: `bubblewrap`, or None for no sandbox.
        read_only: Files and folders that the program can read in the sandbox, beside the system's and those
            that the command names.
        limits: Limits of the sandbox, as the fields of `SandboxLimits`.

    Raises:
        ConfigError: The command is not a list of words, its program or script does not exist, the user does
            not exist or cannot be assumed, or the sandbox's options are invalid.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        sandbox: str | None = None,
        read_only: Sequence[str] = (),
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ConfigError(
                f"the command must be a list of words, such as ['node', './agent.js'], not {command!r}"
            )
        self.command = [
            # The program runs in an empty directory, where a relative path names nothing.
            os.path.abspath(word) if os.path.isfile(word) else word
            for word in command
        ]
        self.env = dict(env or {})
        _check_files(self.command, self.env.get("PATH", os.environ.get("PATH")))
        self.user = None if user is None else _user(user)
        self.sandbox = None if sandbox is None else ProgramSandbox(sandbox, self.command, read_only, limits)
        if sandbox is None and (read_only or limits):
            raise ConfigError("agent.options.read_only and limits apply only with agent.options.sandbox")
        if sandbox is not None and user is not None:
            raise ConfigError("agent.options.user does not apply in a sandbox, which has a user of its own")

    async def run(self, task: TaskView, session: Session) -> Result:
        if self.sandbox is not None:
            return await self._run_in(self.sandbox, task, session)
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            result_file = Path(folder, "result.json")
            if self.user is not None:
                os.chown(folder, self.user.pw_uid, self.user.pw_gid)
            environment = {
                **os.environ,
                **self._environment(session, session.base_url, self._write_task(folder, task), result_file),
            }
            transport, program = await asyncio.get_running_loop().subprocess_exec(
                _Program,
                *self.command,
                cwd=folder,
                env=environment,
                start_new_session=True,
                **self._as_user(),
            )
            try:
                await program.communicate(_prompt(task))
            finally:
                program.kill_group()
                transport.close()
            if transport.get_returncode() != 0:
                stderr = program.output(2)[-STDERR_SHOWN:]
                raise RuntimeError(
                    f"{self.command[0]} exited with status {transport.get_returncode()}: {stderr}"
                )
            try:
                return _result(_read_own_file(result_file))
            except FileNotFoundError:
                return Result(program.output(1))

    async def _run_in(self, sandbox: ProgramSandbox, task: TaskView, session: Session) -> Result:
        """Runs the program in a sandbox; raises as `run` does."""
        async with await sandbox.open(session.remaining()) as box:
            await box.write("task.json", _task_text(task))
            inside = await box.reach(session.base_url)
            work = Path(box.work)
            environment = self._environment(session, inside, work / "task.json", work / "result.json")
            end = await box.run(self.command, stdin=_prompt(task), env=environment)
            if not end.ok:
                limit = f" by the sandbox's limit {end.limit}" if end.limit else ""
                how = f"exited with status {end.exit_code}{limit}"
                raise RuntimeError(f"{self.command[0]} {how}: {end.stderr[-STDERR_SHOWN:]}")
            try:
                return _result(await box.read("result.json", MAX_RESULT))
            except FileNotFoundError:
                return Result(end.stdout)

    def _as_user(self) -> dict[str, Any]:
        """Returns the arguments of `subprocess_exec` that give the program only that user's rights."""
        if self.user is None:
            return {}
        return {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}

    def _environment(
        self, session: Session, base_url: str, task_file: Path, result_file: Path
    ) -> dict[str, str]:
        address = base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": session.api_key,
            # Anthropic's clients add /v1 themselves.
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": session.api_key,
            "TIDEGATE_MCP_URL": f"{address}/mcp",
            "MODEL": session.model,
            "SEED": str(session.seed if session.seed is not None else 0),
            "TASK_FILE": str(task_file),
            "RESULT_FILE": str(result_file),
            **({} if self.user is None else {"HOME": self.user.pw_dir, "USER": self.user.pw_name}),
            **self.env,
        }

    def _write_task(self, folder: str, task: TaskView) -> Path:
        file = Path(folder, "task.json")
        file.write_text(_task_text(task), encoding="utf-8")
        if self.user is not None:
            os.chown(file, self.user.pw_uid, self.user.pw_gid)
        return file


def _check_files(command: Sequence[str], path: str | None) -> None:
    """Raises ConfigError if the program, or the script that an interpreter is to run, does not exist."""
    program, *arguments = command
    if shutil.which(program, path=path) is None:
        if os.path.isfile(program):
            raise ConfigError(
                f"agent.options.command: {program} is not executable: run chmod +x, or name its interpreter "
                "before it"
            )
        where = f"at {os.path.abspath(program)}" if "/" in program else f"in PATH ({path})"
        raise ConfigError(f"agent.options.command: there is no program {program!r}: looked for it {where}")
    if INTERPRETER.fullmatch(os.path.basename(program)) is None:
        return
    for word in itertools.takewhile(lambda word: UNCHECKED.fullmatch(word) is None, arguments):
        if SCRIPT.fullmatch(word) and not word.startswith("-"):
            if not os.path.exists(word):
                raise ConfigError(
                    f"agent.options.command: the script {word!r} does not exist: there is no "
                    f"{os.path.abspath(word)}; give its path, absolute or from the directory of the start"
                )
            return


def _user(user: str | int) -> pwd.struct_passwd:
    """Raises ConfigError if the user does not exist, or this process has no right to assume it."""
    try:
        entry = pwd.getpwnam(user) if isinstance(user, str) else pwd.getpwuid(user)
    except KeyError:
        raise ConfigError(f"agent.options.user = {user!r}: there is no such user on this machine") from None
    if os.geteuid() not in (0, entry.pw_uid):
        raise ConfigError(
            f"agent.options.user = {user!r}: only root can run a program as another user; start the run as "
            "root, or remove the option"
        )
    return entry


def _task_text(task: TaskView) -> str:
    return json.dumps({"id": task.id, "messages": list(task.messages)})


def _prompt(task: TaskView) -> bytes:
    content = task.messages[-1].get("content") if task.messages else ""
    return (content if isinstance(content, str) else json.dumps(content)).encode()


class _Program(asyncio.SubprocessProtocol):
    """A running program: keeps the last part of its output and reports its exit.

    asyncio's streams would also wait for the pipes, which an orphaned child process keeps open.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._killed = False
        self._output = {1: bytearray(), 2: bytearray()}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        buffer = self._output[fd]
        buffer += data
        if len(buffer) > 2 * MAX_STDOUT:
            del buffer[:-MAX_STDOUT]

    def process_exited(self) -> None:
        if not self._exited.done():
            self._exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    async def communicate(self, prompt: bytes) -> None:
        """Writes the prompt to stdin and waits until the program and its children have exited."""
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(prompt)
        stdin.close()
        await self._exited
        self.kill_group()
        await self._closed

    def kill_group(self) -> None:
        """Kills the process group; only once after the exit, because its id may be reused."""
        if self._killed:
            return
        self._killed = self._exited.done()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def output(self, fd: int) -> str:
        return self._output[fd][-MAX_STDOUT:].decode("utf-8", "replace")


def _read_own_file(file: Path) -> bytes:
    """Reads a regular file that the program owns; refuses links to other files, and pipes."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        status, folder = os.fstat(opened.fileno()), file.parent.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != folder.st_uid:
            raise ValueError("RESULT_FILE is not a regular file owned by the program's user")
        if len(content := opened.read(MAX_RESULT + 1)) > MAX_RESULT:
            raise ValueError(f"RESULT_FILE has more than {MAX_RESULT:,} bytes, the limit")
        return content


def _result(text: bytes) -> Result:
    """Reads the content of RESULT_FILE."""
    try:
        fields: dict[str, Any] = json.loads(text)
        return Result(fields["output"], fields.get("reward"), fields.get("metrics") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"RESULT_FILE: {error!r}", file=sys.stderr)
        raise ValueError(
            'RESULT_FILE is not JSON of the form {"output": ..., "reward"?, "metrics"?}'
        ) from error


class ProgramSandbox:
    """Opens a sandbox for each episode's program.

    Args:
        backend: The sandbox's backend; only `bubblewrap` can give access to the gateway alone.
        command: The program and its arguments; those that are files can be read in the sandbox.
        read_only: Further files and folders that the program can read.
        limits: Fields of `SandboxLimits`; `wall_s` is the episode's deadline.

    Raises:
        ConfigError: Another backend, a path that does not exist, or an unknown limit.
    """

    def __init__(
        self, backend: str, command: Sequence[str], read_only: Sequence[str], limits: Mapping[str, Any] | None
    ) -> None:
        if backend != "bubblewrap":
            text = "only bubblewrap gives a program access to the gateway and to nothing else"
            raise ConfigError(f"agent.options.sandbox = {backend!r}: {text}")
        named = [word for word in command if os.path.isabs(word) and os.path.exists(word)]
        self._read_only = list(dict.fromkeys([*map(_existing, read_only), *named]))
        self._limits = _limits({"output_bytes": OUTPUT_BYTES, **(limits or {})})

    async def open(self, seconds: float) -> Sandbox:
        """Opens a sandbox whose commands may take these seconds; raises SandboxError if it cannot start."""
        limits = replace(self._limits, wall_s=max(seconds, 0.001))
        return await open_sandbox(limits, read_only=self._read_only)


def _existing(path: str) -> str:
    if not os.path.exists(path):
        raise ConfigError(f"agent.options.read_only: there is no file or folder {path!r}")
    return os.path.abspath(path)


def _limits(values: Mapping[str, Any]) -> SandboxLimits:
    known = [field.name for field in fields(SandboxLimits) if field.name != "wall_s"]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"agent.options.limits has no {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
            )
    return SandboxLimits(**values)
