"""The online demo: `make demo-online`, or `python examples/online/demo.py [--section.key value ...]`.

Runs `tidegate serve` and forty users of the service, and kills the gateway, the engine and the trainer once
each while the users talk. Prints the share of right answers to held-out questions before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from users import Users

from tidegate.config import load_settings
from tidegate.errors import TidegateError
from tidegate.gateway.project_keys import create_key
from tidegate.service.directory_lock import DirectoryLock

CONFIG = Path(__file__).with_name("config.toml")
KILLS = ((0.2, "gateway"), (0.4, "engine"), (0.6, "trainer"))
"""Shares of the steps after which a process is killed."""
QUESTIONS = 200
Hook = Callable[[str], Awaitable[object]]
"""Is called with the gateway's URL."""


@dataclass
class Result:
    """Measurements of one run of the demo.

    Attributes:
        before: Share of right answers to held-out questions before the first step.
        after: The same after the last step.
        thumbs: The accepted feedback, by the group of its conversation.
        ends: What became of each of these groups.
    """

    run_dir: Path
    before: float = 0.0
    after: float = 0.0
    seconds: float = 0.0
    thumbs: dict[str, float] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)


class Service:
    """`tidegate serve` in a process, whose lines are printed and counted."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._changed = asyncio.Condition()
        self.url: str | None = None
        self.steps = 0
        self.ended = False

    async def read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode().rstrip()
            print(text, flush=True)
            async with self._changed:
                if found := re.match(r"serving at (\S+)/v1", text):
                    self.url = found[1]
                if found := re.search(r"\bstep +(\d+)/", text):
                    self.steps = int(found[1])
                self.ended |= "training has ended" in text
                self._changed.notify_all()
        async with self._changed:
            self.ended = True
            self._changed.notify_all()

    async def until_step(self, step: int) -> None:
        """Wait for a step, or the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or self.steps >= step)

    async def address(self) -> str:
        """Return the gateway's URL; raises TidegateError if the service ends before it has one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or self.url is not None)
        if self.url is None:
            raise TidegateError("tidegate serve ended, see above")
        return self.url


@contextlib.asynccontextmanager
async def serving(overrides: Sequence[str], keys: Path) -> AsyncIterator[Service]:
    """Run the service, and stop it at the end."""
    parent_death = [sys.executable, "-m", "tidegate.service.parent_death", str(os.getpid())]
    serve = [sys.executable, "-m", "tidegate", "serve", str(CONFIG), f"--gateway.keys={keys}"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *parent_death, *serve, *overrides, stdout=pipe, start_new_session=True
    )
    service = Service(process)
    reading = asyncio.create_task(service.read())
    try:
        yield service
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await reading


async def run(overrides: Sequence[str], at_first_step: Hook | None = None) -> Result:
    """Run the demo. Raises what a user of the service meets.

    Args:
        overrides: Settings as `--section.key value`.
        at_first_step: Called with the gateway's URL after the first step.
    """
    settings = load_settings(CONFIG, overrides)
    run_dir = settings.run_dir.absolute()
    with DirectoryLock(run_dir, "the demo") as lock:
        lock.set_aside()
    keys = run_dir / "keys.json"
    run_dir.mkdir(parents=True, exist_ok=True)
    key, result, began = create_key(keys, "shop"), Result(run_dir), time.monotonic()
    async with serving(overrides, keys) as service:
        users = Users(await service.address(), key)
        result.before = await users.evaluate(QUESTIONS)
        print(f"held out, before: {result.before:.1%} right", flush=True)
        users_task = asyncio.create_task(users.run())
        kills_task = asyncio.create_task(
            _kill_in_turn(service, run_dir, settings.trainer.steps, at_first_step)
        )
        done, _ = await asyncio.wait((users_task, kills_task), return_when=asyncio.FIRST_COMPLETED)
        for task in (users_task, kills_task):
            task.cancel()
        await asyncio.gather(users_task, kills_task, return_exceptions=True)
        for task in done:
            task.result()
        result.after = await users.evaluate(QUESTIONS)
        result.seconds = time.monotonic() - began
        result.thumbs = users.thumbs
        result.ends = await _group_states(users)
    print(f"held out, after: {result.after:.1%} right ({result.before:.1%} before)")
    counted = Counter(result.ends.values())
    print(f"{result.seconds:.0f} s; {len(users.thumbs)} thumbs, whose conversations ended: {dict(counted)}")
    return result


async def _kill_in_turn(service: Service, run_dir: Path, steps: int, at_first_step: Hook | None) -> None:
    """Kill the processes in turn, then wait for the end of the training."""
    if at_first_step is not None:
        await service.until_step(1)
        await at_first_step(await service.address())
    for share, name in KILLS:
        await service.until_step(round(share * steps))
        pid = json.loads((run_dir / "logs" / f"{name}.address").read_text())["pid"]
        print(f"kill -9 {pid} (the {name})", flush=True)
        os.kill(pid, signal.SIGKILL)
    await service.until_step(steps + 1)


async def _group_states(users: Users) -> dict[str, str]:
    """Return the state of each group with feedback: `stepped`, `refused`, `ready`, …"""
    ends = {}
    async with aiohttp.ClientSession(headers=users.headers) as http:
        for group in users.thumbs:
            async with http.get(f"{users.url}/v1/groups/{group}") as response:
                row = await response.json()
                ends[group] = row["state"] if response.status == 200 else f"{response.status}"
    return ends


def main(overrides: Sequence[str]) -> int:
    try:
        asyncio.run(run(overrides))
    except TidegateError as error:
        print(f"demo-online: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
