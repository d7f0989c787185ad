"""Attempts to escape from sandboxes, sandboxes whose owner is killed, and start times.

Each attempt (`escapes.py`, `escapes_files.py`) runs in a bubblewrap sandbox, where it must fail, and without
the protection, where it must succeed; otherwise it would prove nothing. Then owners of sandboxes are killed
(-9) at random times, until 1,000 sandboxes were opened: no process and no folder may remain. Needs root, for
the attempts that only root can make without protection.

    python benchmarks/sandbox.py [--json] [--sandboxes 1000] [--starts 60] [--seed 0] [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Check, parser_of, report
from escapes import ATTEMPTS, RAW, Attempt
from escapes_files import TRICKS
from escapes_world import SECRET, Targets, attempted, marked

from tidegate.errors import SandboxError
from tidegate.sandbox import Sandbox, SandboxLimits, SandboxPool, open_sandbox
from tidegate.sandbox.owned import PREFIX, remove_orphans

LOOSE = SandboxLimits(
    memory_mb=8192, processes=5000, disk_mb=4096, output_bytes=10 << 20, cpu_s=10_000, wall_s=60
)
OWNERS = 3
"""Owners at the same time."""
GONE_S = 10.0
SUPERVISED_S = 3.0
"""Time after which a sandbox that does not respond is broken."""


# ---------------------------------------------------------------------- escapes


async def in_sandbox(attempt: Attempt, targets: Targets, backend: str) -> bool:
    """Whether the attempt succeeds in a sandbox of this backend."""
    loose = backend == "none"
    limits = LOOSE if loose else SandboxLimits(**attempt.limits)  # type: ignore[arg-type]
    with targets.victim() as victim:
        async with await open_sandbox(limits, backend) as box:
            world = {**targets.world, "victim": victim.pid, "reach": await box.reach(targets.session_url)}
            command = [sys.executable if loose else "python3", "-I", "-"]
            timeout_s = attempt.loose_s if loose else attempt.timeout_s
            running = box.run(command, timeout_s, stdin=attempted(attempt, world))
            try:
                result = await asyncio.wait_for(running, timeout_s + SUPERVISED_S)
            except (SandboxError, TimeoutError):
                return attempt.check == "supervisor"
            if attempt.check == "output":
                return "ESCAPED" in result.stdout
            if attempt.check == "supervisor":
                return await _is_broken(box)
            if attempt.check == "victim":
                return _ended(victim)
        return bool(marked(targets.world["survivor"]))


def as_process(attempt: Attempt, targets: Targets) -> bool:
    """Whether the attempt succeeds in an ordinary process."""
    with targets.victim() as victim, tempfile.TemporaryDirectory() as folder:
        world = {**targets.world, "victim": victim.pid, "reach": targets.session_url}
        result = subprocess.run(
            [sys.executable, "-I", "-"], input=attempted(attempt, world), cwd=folder, capture_output=True,
            text=True, timeout=attempt.loose_s, pass_fds=[targets.descriptor],
        )  # fmt: skip
        if attempt.check == "survivor":
            return bool(marked(targets.world["survivor"], within_s=2.0))
        return "ESCAPED" in result.stdout


async def _is_broken(box: Sandbox) -> bool:
    try:
        return (await asyncio.wait_for(box.run("true"), SUPERVISED_S)).limit == "supervisor"
    except (SandboxError, TimeoutError):
        return True


def _ended(victim: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        victim.wait(0.2)
    return victim.poll() is not None


async def escapes(only: str) -> tuple[int, list[str], list[str]]:
    """Returns the number of attempts, those that succeeded, and those that fail without protection too."""
    escaped, unproven = [], []
    attempts = [attempt for attempt in ATTEMPTS if only in attempt.name]
    tricks = {name: trick for name, trick in TRICKS.items() if only in name}
    with Targets() as targets:
        async with await open_sandbox() as other, await open_sandbox(backend="none") as loose_other:
            for box in (other, loose_other):
                await box.write(targets.world["other_file"], targets.world["token"])
                await box.run(f"setsid sh -c 'sleep 300; : {targets.world['other_marker']}' &")
            for attempt in attempts:
                if await in_sandbox(attempt, targets, "bubblewrap"):
                    escaped.append(attempt.name)
                if not await unprotected(attempt, targets):
                    unproven.append(attempt.name)
        for name, trick in tricks.items():
            async with await open_sandbox() as box:
                if await trick(box, {**targets.world, "scratch": "/tmp/scratch"}):
                    escaped.append(name)
            targets.clear()
            async with await open_sandbox(LOOSE, "none") as box:
                if not await trick(box, targets.world, naive=True):
                    unproven.append(name)
            targets.clear()
    return len(attempts) + len(tricks), escaped, unproven


async def unprotected(attempt: Attempt, targets: Targets) -> bool:
    """Whether the attempt succeeds without protection."""
    if attempt.control == RAW:
        return await asyncio.to_thread(as_process, attempt, targets)
    return await in_sandbox(attempt, targets, "none")


# ---------------------------------------------------------------------- killed owners


async def own(backend: str, mark: int, seed: int) -> None:
    """Opens sandboxes, with processes in them, until this process is killed."""
    rng = random.Random(seed)
    async with SandboxPool(SandboxLimits(cpu_s=mark), 3, backend) as pool:

        async def use() -> None:
            while True:
                async with pool.take({"file": "x" * 10_000}) as box:
                    print("opened", flush=True)
                    leave = f"sleep {mark} & setsid sleep {mark} & (setsid setsid sleep {mark} &) ; true"
                    await box.run(leave)
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(box.run(f"sleep {mark}"), rng.uniform(0.0, 0.15))

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(use())


def killed_owners(sandboxes: int, rng: random.Random) -> dict[str, Any]:
    """Kills owners until they have opened so many sandboxes; returns what they left behind."""
    mark, opened, kills = rng.randrange(10**8, 10**9), 0, 0
    before = set(_folders())
    with tempfile.TemporaryDirectory() as logs:
        while opened < sandboxes:
            backends = [rng.choice(["bubblewrap", "bubblewrap", "none"]) for _ in range(OWNERS)]
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(open(f"{logs}/{number}", "w+b")) for number in range(OWNERS)]
                command = [
                    sys.executable,
                    __file__,
                    "--mark",
                    str(mark),
                    "--seed",
                    str(rng.random()),
                    "--own",
                ]
                owners = [
                    subprocess.Popen([*command, backend], stdout=file)
                    for backend, file in zip(backends, files, strict=True)
                ]
                for owner in owners:
                    time.sleep(rng.uniform(1.0, 4.0))
                    owner.send_signal(signal.SIGKILL)
                    kills += 1
                for owner in owners:
                    owner.wait()
                for file in files:
                    file.seek(0)
                    opened += file.read().count(b"opened")
        processes = marked(str(mark), gone_within_s=GONE_S)
        remove_orphans()
        folders = set(_folders()) - before
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return {
        "sandboxes": opened, "owners_killed": kills,
        "leaked_processes": len(processes), "leaked_dirs": len(folders),
    }  # fmt: skip


def _folders() -> Iterator[str]:
    return (path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


# ---------------------------------------------------------------------- starts


async def starts(number: int) -> dict[str, float]:
    """Returns medians in milliseconds, to the end of a first command."""
    cold, warm, runs, closes = [], [], [], []
    for _ in range(number):
        began = time.perf_counter()
        box = await open_sandbox()
        await box.run("true")
        cold.append(time.perf_counter() - began)
        began = time.perf_counter()
        await box.run("true")
        runs.append(time.perf_counter() - began)
        began = time.perf_counter()
        await box.close()
        closes.append(time.perf_counter() - began)
    async with SandboxPool(size=8) as pool:
        for _ in range(number):
            while pool.waiting < pool.size:  # noqa: ASYNC110 - the pool has no event for users
                await asyncio.sleep(0.005)
            began = time.perf_counter()
            async with pool.take() as box:
                await box.run("true")
                warm.append(time.perf_counter() - began)
    named = {"cold_start_ms": cold, "warm_start_ms": warm, "run_ms": runs, "close_ms": closes}
    figures = {name: 1000 * statistics.median(values) for name, values in named.items()}
    return {**figures, "warm_start_p95_ms": 1000 * sorted(warm)[int(0.95 * len(warm))]}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--sandboxes", type=int, default=1000, help="opened by owners that are killed")
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", default="", help="attempts whose name contains this, and nothing else")
    parser.add_argument("--own", help=argparse.SUPPRESS)
    parser.add_argument("--mark", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own is not None:
        asyncio.run(own(arguments.own, arguments.mark, arguments.seed))
        return 0
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        parser.error("needs root, and bwrap")
    os.environ[SECRET.name] = SECRET.value
    number, escaped, unproven = asyncio.run(escapes(arguments.only))
    row = {"attempts": number, "escapes": len(escaped), "unproven": len(unproven)}
    for name in escaped:
        print(f"ESCAPED: {name}")
    for name in unproven:
        print(f"fails without protection too: {name}")
    checks = [Check("escapes", len(escaped), "==", 0), Check("unproven", len(unproven), "==", 0)]
    if arguments.only:
        return report([row], checks, as_json=arguments.json)
    speed = asyncio.run(starts(arguments.starts))
    killed = killed_owners(arguments.sandboxes, random.Random(arguments.seed))
    checks += [
        Check("attempts", number, ">=", 40),
        Check("leaked_processes", killed["leaked_processes"], "==", 0),
        Check("leaked_dirs", killed["leaked_dirs"], "==", 0),
        Check("warm_start_ms", speed["warm_start_ms"], "<=", 50),
    ]
    return report([row, speed, killed], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
