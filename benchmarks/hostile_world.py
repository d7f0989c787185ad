"""The service that `hostile.py` attacks, its honest users, and what both sides send requests with."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tidegate.errors import TidegateError

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "tiny_base" / "model"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
PRIVACY = "import re\ndef redact(text):\n    return re.sub(r'\\S{1,64}@\\S{1,64}', '[mail]', text)\n"
SETTINGS = [
    "--run.live_view=false", "--run.name=run", "--trainer.groups_per_batch=16", "--trainer.schedule=constant",
    "--trainer.max_staleness=none", "--trainer.steps=1000000", "--trainer.checkpoint_every=10",
    "--gateway.port=0", "--gateway.conversation_idle_s=1", "--gateway.feedback_window_s=20",
    "--engine.max_slots=32", "--engine.prefix_cache_mb=8", "--trainer.learning_rate=1e-6",
]  # fmt: skip
USERS = 4
"""Users of each honest key."""
START_S, LIMIT_S = 300.0, 120.0
KEPT = ("open", "ready", "leased", "stepped")
"""States of groups whose feedback is not lost."""
Answer = tuple[int, str]


@dataclass
class Server:
    """The service: its process, its directory and its addresses."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path
    url: str = ""

    def address(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "logs" / f"{name}.address").read_text())
        return found

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_text().count('"step":') if metrics.exists() else 0

    def rss(self, name: str) -> tuple[float, float]:
        """Returns the memory of a process now, and the most that it had, in MB."""
        status = Path(f"/proc/{self.address(name)['pid']}/status").read_text()
        now, peak = (re.search(rf"{key}:\s+(\d+)", status) for key in ("VmRSS", "VmHWM"))
        assert now is not None
        assert peak is not None
        return int(now[1]) / 1024, int(peak[1]) / 1024


PROCESSES = ("gateway", "engine", "trainer")


def started(command: list[str], out: Any, **environment: str) -> subprocess.Popen[bytes]:
    """Starts a program of this benchmark, which ends with it however it ends."""
    tied = [sys.executable, "-m", "tidegate.service.parent_death", str(os.getpid())]
    return subprocess.Popen(
        [*tied, *command], cwd=ROOT, env=ENVIRONMENT | environment, stdout=out, stderr=out
    )


@contextlib.asynccontextmanager
async def serving(place: Path, keys: Path) -> AsyncIterator[Server]:
    """Runs `tidegate serve`."""
    (place / "privacy.py").write_text(PRIVACY)
    output = place / "out"
    serve = [sys.executable, "-m", "tidegate", "serve", str(ROOT / "examples/online/config.toml")]
    own = [f"--run.dir={place}", f"--gateway.keys={keys}", f"--gateway.redact={place / 'privacy.py'}:redact"]
    with output.open("wb") as out:
        process = started([*serve, *SETTINGS, *own], out)
    server = Server(process, place / "run", output)
    try:
        await until(
            lambda: (server.run_dir / "logs" / "trainer.address").exists(), "the trainer", START_S, process
        )
        server.url = server.address("gateway")["url"]
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 60)
        process.kill()
        process.wait()


async def until(holds: Callable[[], bool], what: str, limit_s: float, process: Any = None) -> None:
    """Waits for a condition. Raises TidegateError after `limit_s`, or if the process has ended."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if process is not None and process.poll() is not None:
            raise TidegateError(f"{process.args} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TidegateError(f"{what} did not come within {limit_s:g} s")
        await asyncio.sleep(0.1)


class Honest:
    """The users of one honest key: they ask, continue, and give feedback, without retries."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.errors: list[str] = []
        self.thumbs: dict[str, float] = {}
        self.longest_s = 0.0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        async with client(self.key) as http:
            await asyncio.gather(*(self.user(http, number) for number in range(USERS)))

    async def user(self, http: aiohttp.ClientSession, number: int) -> None:
        question = 0
        while not self.stop.is_set():
            question += 1
            try:
                await self.talk(http, f"{self.key[-6:]} user {number}, question {question}")
            except (OSError, TimeoutError, aiohttp.ClientError, AssertionError) as error:
                self.errors.append(repr(error)[:300])

    async def talk(self, http: aiohttp.ClientSession, text: str) -> str:
        messages, reply = [{"role": "user", "content": text}], {}
        for more in ("and then?", ""):
            reply = await self.ok(http, "/v1/chat/completions", {"model": "m", "messages": messages})
            content = reply["choices"][0]["message"].get("content") or ""
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": more}]
        value = float(len(content) % 2)
        group: str = (await self.ok(http, "/v1/feedback", {"id": reply["id"], "value": value}))["group"]
        self.thumbs[group] = value
        return group

    async def ok(self, http: aiohttp.ClientSession, path: str, body: Any) -> Any:
        began = time.monotonic()
        status, text = await call(http, "POST", self.url + path, body)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        assert status == 200, f"{path}: {status} {text}"
        return json.loads(text)

    async def lost(self) -> list[str]:
        """Returns the groups with feedback that are not, or will not be, trained on."""
        states = {}
        async with client(self.key) as http:
            for group in self.thumbs:
                status, text = await call(http, "GET", f"{self.url}/v1/groups/{group}")
                states[group] = json.loads(text)["state"] if status == 200 else f"{status}: {text[:100]}"
        return [f"{group}: {state}" for group, state in states.items() if state not in KEPT]


def client(key: str | None, **more: Any) -> aiohttp.ClientSession:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    return aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=64), **more
    )


async def call(http: aiohttp.ClientSession, method: str, url: str, body: Any = None, **more: Any) -> Answer:
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    data = None if sent is None else io.BytesIO(sent)  # sent in pieces, which keeps this process responsive
    headers = {"Content-Type": "application/json", **more.pop("headers", {})}
    async with http.request(method, url, data=data, headers=headers, **more) as response:
        return response.status, await response.text()


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def raw(url: str, *parts: bytes, half_close: bool = False, limit_s: float = 60.0) -> bytes:
    """Sends bytes on a connection of their own; returns what came until the other side closed it."""
    reader, writer = await connect(url)
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
            if half_close:
                writer.write_eof()
        with contextlib.suppress(ConnectionError, TimeoutError):
            return await asyncio.wait_for(reader.read(), limit_s)
        return b""
    finally:
        writer.close()


async def many(number: int, width: int, work: Callable[[int], Awaitable[Any]]) -> None:
    """Runs `work(0)` to `work(number - 1)`, at most `width` at a time."""
    numbers = iter(range(number))

    async def worker() -> None:
        for one in numbers:
            await work(one)

    await asyncio.gather(*(worker() for _ in range(width)))
