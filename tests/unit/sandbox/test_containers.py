"""The calls of `docker`, with a stand-in of its command line that runs commands on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sandbox.test_owned import of_another_process
from tidegate.errors import ConfigError, SandboxError
from tidegate.sandbox import Sandbox, SandboxLimits, open_sandbox
from tidegate.sandbox.inside.archive import OverLimit
from tidegate.sandbox.owned import owned_name

STAND_IN = f"""#!{sys.executable}
import json, os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
words = sys.argv[1:]
with open(here + "/calls", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
state = json.load(open(here + "/state"))
if words[0] in state["fails"]:
    sys.exit(state["fails"][words[0]])
if words[0] == "ps":
    print("\\n".join(state["containers"]))
elif words[0] == "inspect":
    print(state["oom"])
elif words[0] == "exec":
    at, environment = 1, {{"PATH": os.environ["PATH"]}}
    if state["gone"]:
        sys.exit(f"Error response from daemon: container {{words}} is not running")
    while words[at].startswith("--"):
        if words[at] == "--interactive":
            at += 1
        else:
            if words[at] == "--env":
                name, _, value = words[at + 1].partition("=")
                environment[name] = value
            at += 2
    command = [word.replace("/work", here + "/work") for word in words[at + 1:]]
    code = subprocess.run(command, env=environment, cwd=here + "/work").returncode
    sys.exit(code if code >= 0 else 128 - code)
"""


class StandIn:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "work").mkdir()
        program = folder / "docker"
        program.write_text(STAND_IN)
        program.chmod(0o755)
        self.set()

    def set(self, **state: object) -> None:
        usual = {"fails": {}, "containers": [], "oom": "false", "gone": False}
        (self.folder / "state").write_text(json.dumps({**usual, **state}))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return stand_in


async def opened(**limits: float) -> Sandbox:
    return await open_sandbox(SandboxLimits(**limits), "docker", image="debian:12")  # type: ignore[arg-type]


async def test_a_container_is_started_with_every_limit_and_removed(docker: StandIn) -> None:
    async with await opened(memory_mb=100, disk_mb=50, processes=20, cpu_s=9):
        pass
    _, run, remove = docker.calls
    name = run[run.index("--name") + 1]
    files = "rw,exec,nosuid,nodev,size=50m,mode=1777"
    assert run == [
        "run", "--detach", "--rm", "--init", "--name", name, "--network", "none", "--read-only",
        "--tmpfs", f"/work:{files}", "--tmpfs", f"/tmp:{files}", "--workdir", "/work", "--user", "1000:1000",
        "--memory", "150m", "--memory-swap", "150m", "--pids-limit", "20", "--ulimit", "cpu=9",
        "--ulimit", "core=0", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--env", "HOME=/work", "--entrypoint", "sleep", "debian:12", "infinity",
    ]  # fmt: skip
    assert remove == ["rm", "--force", "--volumes", name]


async def test_a_command_gets_its_input_variables_and_timeout(docker: StandIn) -> None:
    async with await opened() as box:
        result = await box.run("cat; echo $NAME >&2; exit 3", 7, stdin="in", env={"NAME": "value"}, cwd="a")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "in", "value\n")
        call = docker.calls[-1]
        name = call[6]
        assert call == [
            "exec", "--interactive", "--env", "NAME=value", "--workdir", "/work/a", name,
            "timeout", "-s", "KILL", "7.000", "/bin/sh", "-c", "cat; echo $NAME >&2; exit 3",
        ]  # fmt: skip


async def test_timeouts_truncated_output_and_lack_of_memory_are_results(docker: StandIn) -> None:
    async with await opened(output_bytes=100) as box:
        slow = await box.run(["sleep", "30"], 0.3)
        assert (slow.exit_code, slow.timed_out, slow.limit, slow.ok) == (137, True, None, False)
        long = await box.run("head -c 5000 /dev/zero")
        assert (len(long.stdout), long.truncated, long.exit_code) == (100, True, 0)
        docker.set(oom="true")
        assert (await box.run("kill -9 $$")).limit == "memory"


async def test_files_are_passed_by_commands(docker: StandIn) -> None:
    async with await opened() as box:
        await box.write("a/run", "#!/bin/sh\necho $0", executable=True)
        await box.add_files({"b": b"\0\1", "c/d": "text"})
        assert (await box.read("b"), await box.read("c/d")) == (b"\0\1", b"text")
        assert (await box.run(["./a/run"])).ok
        (docker.folder / "work" / "link").symlink_to("/etc/passwd")
        async with await box.fresh() as other:
            await other.restore(await box.snapshot())
        with pytest.raises(FileNotFoundError):
            await box.read("none")
        with pytest.raises(IsADirectoryError):
            await box.read("c")
        with pytest.raises(OSError, match="larger than 3 bytes"):
            await box.read("c/d", 3)
        with pytest.raises(OverLimit):
            await box.snapshot(2)
        with pytest.raises(ConfigError, match="use the backend bubblewrap"):
            await box.reach("http://127.0.0.1:1/v1")


async def test_containers_of_ended_processes_are_removed_first(docker: StandIn) -> None:
    theirs = of_another_process()
    docker.set(containers=[owned_name(), theirs, "something-else"])
    async with await opened():
        assert docker.calls[1] == ["rm", "--force", "--volumes", theirs]


@pytest.mark.parametrize(("call", "message"), [("ps", "does not work"), ("run", "cannot start 'debian:12'")])
async def test_a_daemon_that_fails_is_a_sandbox_error(docker: StandIn, call: str, message: str) -> None:
    docker.set(fails={call: 125})
    with pytest.raises(SandboxError, match=message):
        await opened()


async def test_a_container_that_is_gone_is_a_sandbox_error(docker: StandIn) -> None:
    async with await opened() as box:
        docker.set(gone=True)
        with pytest.raises(SandboxError, match="is not running"):
            await box.run("true")
        assert box.closed


async def test_a_container_that_ends_after_a_program_ran_is_a_result(docker: StandIn) -> None:
    """`pkill sleep` in it ends the container: a policy could discard each episode that it would lose."""
    async with await opened() as box:
        assert (await box.run("true")).ok
        docker.set(gone=True)
        for _ in range(2):
            result = await box.run("true")
            assert (result.exit_code, result.limit, result.ok) == (137, "supervisor", False)
        with pytest.raises(OverLimit, match="is not running"):
            await box.snapshot()


def has_image(program: str) -> bool:
    command = ["sh", "-c", f"{program} image inspect debian:12"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("program", ["docker", "podman"])
async def test_the_real_program(program: str) -> None:
    if not has_image(program):
        pytest.skip(f"{program} has no daemon, or no image debian:12")
    async with await open_sandbox(backend=program, image="debian:12", files={"a": "hello"}) as box:
        assert (await box.run("cat a")).stdout == "hello"
        assert await box.read("a") == b"hello"
