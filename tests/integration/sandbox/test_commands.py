"""Commands and files of real sandboxes, with namespaces and without."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest

from tests.sandboxes import needs_bubblewrap, with_words
from tests.waiting import eventually
from tidegate.errors import SandboxError
from tidegate.sandbox import SandboxLimits, open_sandbox, verify_fresh
from tidegate.sandbox.inside.archive import OverLimit

each_backend = pytest.mark.parametrize(
    "backend", [pytest.param("bubblewrap", marks=needs_bubblewrap), pytest.param("none")]
)
SMALL = SandboxLimits(memory_mb=256, disk_mb=16, output_bytes=1000, wall_s=20)


@each_backend
async def test_a_command_has_input_output_and_an_exit_code(backend: str) -> None:
    async with await open_sandbox(SMALL, backend, {"a/b": "file"}) as box:
        result = await box.run("cat; cat a/b; pwd; echo $X >&2; exit 3", stdin="in ", env={"X": "é"})
        assert (result.exit_code, result.stdout, result.stderr) == (3, f"in file{box.work}\n", "é\n")
        assert not result.ok
        assert (await box.run(["printf", "%s", "$HOME"], cwd="a")).stdout == "$HOME"
        assert (await box.run("pwd", cwd="a")).stdout == f"{box.work}/a\n"
        assert (await box.run("kill -9 $$")).exit_code == 137


@each_backend
async def test_a_command_that_cannot_start_is_a_result(backend: str) -> None:
    async with await open_sandbox(SMALL, backend) as box:
        for command, folder in ((["no-such-program"], ""), (["true"], "no-such-folder"), (["a\0b"], "")):
            result = await box.run(command, cwd=folder)
            assert result.exit_code == 127
            assert "cannot run" in result.stderr


async def test_a_supervisor_that_a_program_ends_is_a_result() -> None:
    async with await open_sandbox(SMALL, "none") as box:
        running = asyncio.create_task(box.run("sleep 60"))
        await eventually(lambda: len(box._calls) == 1)
        ended = await box.run("echo so; sleep 0.2; kill -9 $PPID; sleep 60")
        assert (ended.exit_code, ended.limit, ended.ok, ended.stdout) == (137, "supervisor", False, "so\n")
        assert (await running).limit == "supervisor"
        assert (await box.run("true")).limit == "supervisor", "and whatever the program tries next"
        assert (await verify_fresh(box, "true")).ok is False
        assert box.closed


async def test_a_supervisor_that_ends_before_any_program_is_an_error() -> None:
    async with await open_sandbox(SMALL, "none") as box:
        box._process.kill()
        await eventually(lambda: box.closed)
        with pytest.raises(SandboxError, match="its first process has ended"):
            await box.run("true")


@each_backend
async def test_files_are_written_and_read(backend: str) -> None:
    async with await open_sandbox(SMALL, backend, {"x": b"\0\xff"}) as box:
        await box.write("d/program", "#!/bin/sh\necho ran", executable=True)
        assert (await box.run(["d/program"])).stdout == "ran\n"
        assert await box.read("x") == b"\0\xff"
        assert await box.read(f"{box.work}/x", 2) == b"\0\xff"
        await box.run("mkfifo pipe")
        with pytest.raises(FileNotFoundError):
            await box.read("none")
        with pytest.raises(IsADirectoryError):
            await box.read("d")
        with pytest.raises(OSError, match="not a regular file"):
            await box.read("pipe")
        with pytest.raises(OSError, match="larger than 1 bytes"):
            await box.read("x", 1)


@each_backend
async def test_commands_run_side_by_side(backend: str) -> None:
    async with await open_sandbox(SMALL, backend) as box:
        await box.run("mkfifo pipe")
        first, second = await asyncio.gather(box.run("cat pipe"), box.run("echo passed > pipe"))
        assert (first.stdout, second.exit_code) == ("passed\n", 0)


@each_backend
async def test_background_processes_outlast_their_command_and_not_their_sandbox(backend: str) -> None:
    word = secrets.token_hex(8)
    async with await open_sandbox(SMALL, backend) as box:
        shell = f"sh -c 'while sleep 0.05; do echo {word}; date > now; done'"
        assert (await box.run(f"{shell} & setsid {shell} & echo started")).stdout == "started\n"
        assert (await box.run("until test -s now; do sleep 0.01; done")).ok
        assert with_words(word)
    await eventually(lambda: not with_words(word))


@each_backend
async def test_a_timeout_ends_the_session_of_the_command(backend: str) -> None:
    word = secrets.token_hex(8)
    async with await open_sandbox(SMALL, backend) as box:
        result = await box.run(f"trap '' TERM; echo begun; (sleep 600; : {word}) & sleep 600", 0.3)
        assert (result.timed_out, result.exit_code, result.stdout) == (True, 137, "begun\n")
        await eventually(lambda: not with_words(word))  # a killed process exits a moment later
        assert (await box.run("echo on")).stdout == "on\n"


@each_backend
async def test_a_cancelled_call_ends_its_command(backend: str) -> None:
    word = secrets.token_hex(8)
    async with await open_sandbox(SMALL, backend) as box:
        running = asyncio.create_task(box.run(f"sleep 600; : {word}"))
        await eventually(lambda: with_words(word))
        running.cancel()
        await eventually(lambda: not with_words(word))
        assert (await box.run("echo on")).stdout == "on\n"


@each_backend
async def test_long_output_is_truncated(backend: str) -> None:
    async with await open_sandbox(SMALL, backend) as box:
        result = await box.run("head -c 100000 /dev/zero | tr '\\0' x; echo error >&2")
        assert (result.stdout, result.stderr, result.truncated, result.exit_code) == (
            "x" * 1000,
            "error\n",
            True,
            0,
        )
        endless = await box.run("yes")
        assert (len(endless.stdout), endless.limit, endless.ok) == (1000, "output", False)


@each_backend
async def test_files_are_carried_to_another_sandbox(backend: str) -> None:
    async with await open_sandbox(SMALL, backend, {"a/b": "1"}) as box, await box.fresh() as other:
        await box.run("ln -s /etc/passwd link; mkfifo pipe; chmod 4755 a/b; truncate -s 1M sparse")
        await other.restore(await box.snapshot())
        listed = await other.run("find . -type f -o -type l -o -type p | sort; stat -c %a a/b")
        assert listed.stdout == "./a/b\n./sparse\n755\n"
        with pytest.raises(OverLimit, match="more than 1000 bytes"):
            await box.snapshot(1000)


@each_backend
async def test_nothing_of_the_environment_is_passed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hidden")
    async with await open_sandbox(SMALL, backend) as box:
        names = {line.partition("=")[0] for line in (await box.run(["env"])).stdout.splitlines()}
        assert names == {"PATH", "HOME", "LANG", "USER"}


@each_backend
async def test_a_closed_sandbox_says_so(backend: str) -> None:
    box = await open_sandbox(SMALL, backend)
    running = asyncio.create_task(box.run("sleep 600"))
    await asyncio.sleep(0)
    await box.close()
    await box.close()
    with pytest.raises(SandboxError, match="it was closed"):
        await running
    with pytest.raises(SandboxError, match="it was closed"):
        await box.run("true")
    assert backend == "bubblewrap" or not Path(box.work).exists()  # noqa: ASYNC240


@needs_bubblewrap
async def test_a_sandbox_that_is_killed_says_so() -> None:
    """A program may have done it, so it is a result, which the policy reads."""
    async with await open_sandbox(SMALL) as box:
        running = asyncio.create_task(box.run("sleep 600"))
        await asyncio.sleep(0)
        box._process.kill()  # type: ignore[attr-defined]
        end = await running
        assert (end.exit_code, end.limit) == (137, "supervisor")
        assert box.closed


@each_backend
async def test_a_start_that_is_cancelled_leaves_no_process(backend: str) -> None:
    mark = 10**8 + secrets.randbelow(10**9)
    for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02):
        starting = asyncio.create_task(open_sandbox(SandboxLimits(cpu_s=mark), backend))
        await asyncio.wait([starting], timeout=delay_s)
        starting.cancel()
        try:
            await (await starting).close()  # it was faster
        except asyncio.CancelledError:
            continue
    await eventually(lambda: not with_words(str(mark)))


@needs_bubblewrap
async def test_paths_of_the_host_are_readable_where_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_text("read")
    (tmp_path / "other").write_text("secret")
    (tmp_path / "given" / "link").symlink_to("file")
    given = [str(tmp_path / "given" / "link"), str(tmp_path / "given"), "/usr/bin/env"]
    async with await open_sandbox(SMALL, read_only=given) as box:
        assert (await box.run(["cat", str(tmp_path / "given" / "link")])).stdout == "read"
        assert (await box.run(["cat", str(tmp_path / "given" / "file")])).stdout == "read"
        assert not (await box.run(["touch", str(tmp_path / "given" / "new")])).ok
        assert not (await box.run(["cat", str(tmp_path / "other")])).ok
    with pytest.raises(SandboxError, match="no-such-path"):
        await open_sandbox(SMALL, read_only=[str(tmp_path / "no-such-path")])
