"""Secrets of processes cannot be read by other processes of the same user or of another one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents_process import started
from tests.tiny_tokenizer import make_model_dir
from tests.unprivileged import unprivileged
from tests.waiting import announced
from tidegate.agents.base import Session
from tidegate.agents.command import CommandAgent
from tidegate.config import Settings
from tidegate.errors import ConfigError
from tidegate.gateway.client import ADMIN_KEY, GatewayClient
from tidegate.trainer.processes.servers import gateway_server
from tidegate.types import Task, TaskView

SECRET = "key-4711-of-nobody-else"
NOBODY = 65534
READ = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel shields is Linux'")


def read_by_same_user(path: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", READ, path], capture_output=True, preexec_fn=unprivileged, check=False
    )


@pytest.fixture
def opened() -> Iterator[Path]:
    """A directory that everybody may enter: what is in it is kept by its own modes."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_linux
def test_a_process_that_is_shielded_is_read_by_no_other_of_its_user() -> None:
    """The same program without its shield is read: the test sees what it looks for."""
    waiting = "print(flush=True); import sys; sys.stdin.read()"
    for shield, readable in (
        ("", True),
        ("from tidegate.service.process_secrets import *; shield_process();", False),
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", shield + waiting],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=unprivileged,
            env={**os.environ, "SECRET": SECRET},
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            seen = read_by_same_user(f"/proc/{process.pid}/environ")
            assert (SECRET.encode() in seen.stdout) is readable, seen.stderr
            maps = read_by_same_user(f"/proc/{process.pid}/maps")
            assert (maps.returncode == 0) is readable


@needs_linux
async def test_a_runs_gateway_keeps_its_key_and_options_secret(opened: Path) -> None:
    model = make_model_dir(opened / "tiny")
    rows = opened / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1+2?", "answer": "3"}) + "\n")
    options = {"path": str(rows), "eval_path": str(rows), "prompt": "question", "system": SECRET}
    raw = {
        "model": {"path": str(model)},
        "gateway": {"shards": 2},
        "env": {"use": "dataset", "options": {**options, "answer": "answer", "rewards": ["exact_match"]}},
    }
    journal = opened / "run" / "gateway"
    service = gateway_server(
        Settings.model_validate(raw), {"admin_key": SECRET}, journal, opened / "run", "127.0.0.1", 0
    )
    try:
        url = await service.start()
        async with GatewayClient(url, SECRET) as client:
            await client.open_session(task=Task("t", "dataset", [{"role": "user", "content": "?"}], SECRET))
        assert SECRET.encode() not in await asyncio.to_thread(told, *family(service.pid))
    finally:
        await service.stop()
    files = [file for file in journal.rglob("*") if file.is_file()]
    assert files
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {file.parent.stat().st_mode & 0o777 for file in files} == {0o700}


def told(*pids: int) -> bytes:
    """What processes were told when they were started."""
    return b"".join(
        Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("cmdline", "environ")
    )


def family(pid: int | None) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(pid or 0), *map(int, children)]


@needs_linux
def test_a_gateway_by_hand_shields_the_key_in_its_environment(tmp_path: Path) -> None:
    announce = tmp_path / "address"
    command = [sys.executable, "-m", "tidegate", "gateway", "--gateway.port=0", "--owned"]
    with subprocess.Popen(
        [*command, "--announce", str(announce), "--model.path", str(make_model_dir(tmp_path / "tiny"))],
        stdin=subprocess.PIPE, preexec_fn=unprivileged, env={**os.environ, ADMIN_KEY: SECRET},
    ) as process:  # fmt: skip
        announced(announce, process)
        seen = read_by_same_user(f"/proc/{process.pid}/environ")
        assert process.stdin is not None
        process.stdin.close()
    assert seen.returncode != 0
    assert b"Permission denied" in seen.stderr


@needs_linux
async def test_an_agents_options_are_not_in_its_command_line(opened: Path) -> None:
    (opened / "mine.py").write_text(
        "import ctypes\n"
        "from tidegate.agents.base import Agent\n"
        "class Mine(Agent):\n"
        "    def __init__(self, token): self.token = token\n"
        "    async def run(self, task, session): \n"
        "        return f'{self.token} {ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)}'\n"  # PR_GET_DUMPABLE
    )
    async with started(f"{opened}/mine.py:Mine", opened, token=SECRET) as agents:
        assert (await agents.run(TaskView("t", [])))["output"] == f"{SECRET} 0"
        assert SECRET.encode() not in await asyncio.to_thread(told, agents.process.pid)


def session() -> Session:
    return Session("http://gate/s/1/v1", "key-1", "policy", 7, time.monotonic() + 30)


@needs_root
@needs_linux
async def test_a_command_as_another_user_reads_neither_the_run_nor_its_processes(opened: Path) -> None:
    run = opened / "run"
    making = "shield_process(); run = pathlib.Path(sys.argv[1]); run.mkdir(); (run / 'config.toml').touch()"
    made = [
        sys.executable,
        "-c",
        f"import sys, pathlib; from tidegate.service.process_secrets import *; {making}",
        str(run),
    ]
    await asyncio.to_thread(subprocess.run, made, check=True)
    reading = f"id -u; cat {run}/config.toml; ls {run}; cat /proc/$PPID/environ; cat $TASK_FILE; exit 0"
    result = await CommandAgent(["/bin/sh", "-c", reading], user=NOBODY).run(TaskView("t-1", []), session())
    assert result.output is not None
    first, _, rest = result.output.partition("\n")
    assert (first, json.loads(rest)) == (str(NOBODY), {"id": "t-1", "messages": []})


@needs_root
@needs_linux
@pytest.mark.parametrize("trick", ["ln -s SECRET $RESULT_FILE", "mkfifo $RESULT_FILE"])
async def test_a_result_file_that_is_not_the_programs_own_is_not_read(opened: Path, trick: str) -> None:
    (opened / "secret").write_text(json.dumps({"output": SECRET}))
    (opened / "secret").chmod(0o600)
    command = ["/bin/sh", "-c", trick.replace("SECRET", str(opened / "secret"))]
    with pytest.raises((OSError, ValueError)):
        await CommandAgent(command, user="nobody").run(TaskView("t", []), session())


def test_a_user_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"agent\.options\.user = 'no-such-user'"):
        CommandAgent(["true"], user="no-such-user")
