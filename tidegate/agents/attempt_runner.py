"""Worker: takes attempts from a gateway, runs an agent on them and finishes them.

The processes of a run's own agents run this code, and so does `tidegate worker`. The agents have a thread and
an event loop of their own, so that an agent that blocks its loop delays no heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from tidegate.agents.base import Agent
from tidegate.agents.episode_runner import CappedLog, EpisodeRunner
from tidegate.errors import GatewayError
from tidegate.service.parent_death import end_with_parent
from tidegate.service.process import run_together

WAIT_S = 30.0
"""Seconds for which a poll waits for attempts."""
TURN_S = 1.0
"""The same, if a worker runs fewer attempts than there are shards, which then take turns."""
RESPONSE_S = 30.0
"""Further seconds in which the gateway must respond."""
MAX_CAPACITY = 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
FINISH_S = 120.0
"""Seconds for which a finish is repeated if the gateway does not respond."""
DELETED = (401, 404)
"""HTTP status of a finish if the attempt's group has ended."""
STOP_S = 5.0
"""Seconds to return the running attempts to the gateway at the end."""
LATE_S, BLOCKED_S = 2.0, 5.0
"""Seconds after its deadline when an agent that blocks its event loop is reported, and ends the process."""
GUARD_S = 0.5


class AttemptRunner:
    """Runs up to `concurrency` attempts of one gateway at a time.

    Args:
        url: Address of the gateway.
        key: The gateway's worker key.
        agent: The agent.
        concurrency: Limit of attempts that run at the same time.
        tell: Prints a line of text.
        name: Name of the worker, unique; by default one with the host's name and the process id.
    """

    def __init__(
        self,
        url: str,
        key: str,
        agent: Agent,
        concurrency: int,
        tell: Callable[[str], None],
        name: str | None = None,
    ) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._identity = {"worker": self.name, "secret": secrets.token_urlsafe(16)}
        self._url = url.rstrip("/")
        self._key = key
        self._concurrency = concurrency
        self._tell = tell
        self._episodes = EpisodeRunner(agent, self._emit)
        self._agents = asyncio.new_event_loop()
        """Event loop of the agents; all calls of `_episodes` are made on it."""
        self._keys: dict[str, tuple[str, str]] = {}
        """Address and finish key of each attempt that has not been finished; its agent never gets the key."""
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()
        """Orders the polls of several shards that wait for a free place."""
        self._kept = 0
        """Places that are kept free for the attempts of running polls."""
        self._alarm: float | None = None
        """When the guard's timer ends the process; None without a guard."""
        self._lost = False
        self._told = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Run attempts until `stop` is set; then return the unfinished ones to the gateway.

        Raises GatewayError if the gateway refuses the worker.
        """
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._agents.run_forever, daemon=True, name="agents").start()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
            polling = asyncio.create_task(self._poll_all())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({polling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            polling.cancel()
            ended = (await asyncio.gather(polling, return_exceptions=True))[0]
            if self._keys:
                self._tell(f"returning {len(self._keys)} attempts to the gateway")
            await self._stop_agents()
            if self._finishing:
                await asyncio.wait(self._finishing, timeout=STOP_S)
            if not isinstance(ended, Exception):
                await self._leave()
            for task in (*self._heartbeats.values(), *self._finishing):
                task.cancel()
            if isinstance(ended, Exception):
                raise ended

    async def _stop_agents(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._on_agents(self._episodes.stop())
        await asyncio.sleep(0)  # the last events

    async def _leave(self) -> None:
        """Return the unfinished attempts: not finished in time, or taken by a cancelled poll."""
        with contextlib.suppress(TimeoutError, GatewayError):  # they end without heartbeats, later
            async with asyncio.timeout(STOP_S):
                await self._call(f"{self._url}/attempts/leave", self._key, self._identity)

    async def _on_agents(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the agents' loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._agents))

    async def _poll_all(self) -> None:
        """Poll each shard of the gateway; the first response has their number."""
        shards = int((await self._poll("", 0.0, MAX_CAPACITY)).get("shards", 1))
        if shards == 1:
            await self._keep_polling()
        await run_together(self._keep_polling_shard(shard, shards) for shard in range(shards))

    async def _keep_polling(self) -> None:
        while True:
            await self._poll("", WAIT_S, MAX_CAPACITY)

    async def _keep_polling_shard(self, shard: int, shards: int) -> None:
        """Poll one of several shards. A poll that waits for attempts keeps one place free, not all."""
        wait_s = WAIT_S if self._concurrency >= shards else TURN_S
        query, taken = f"?shard={shard}", True
        while True:
            answer = await self._poll(query, *((0.0, MAX_CAPACITY) if taken else (wait_s, 1)))
            taken = bool(answer["attempts"])

    async def _poll(self, query: str, wait_s: float, capacity: int) -> dict[str, Any]:
        """Take and start at most `capacity` attempts, for which places are kept free meanwhile."""
        await self._on_agents(asyncio.sleep(0))  # a blocked loop gets no further attempts
        async with self._turn:
            while (free := self._concurrency - len(self._keys) - self._kept) <= 0:
                self._freed.clear()
                await self._freed.wait()
            kept = min(free, capacity)
            self._kept += kept
        try:
            body = {**self._identity, "capacity": kept, "wait_s": wait_s}
            answer: dict[str, Any] = await self._call(f"{self._url}/attempts/next{query}", self._key, body)
        finally:
            self._kept -= kept
            self._freed.set()
        for attempt in answer["attempts"]:
            url = attempt["base_url"].partition("/s/")[0] if query else self._url
            self._start(attempt, url)
        for name in answer.get("ended", ()):
            self._drop(name)
        return answer

    def _start(self, attempt: dict[str, Any], url: str) -> None:
        """Start an attempt of the gateway or shard at `url`."""
        name = attempt["attempt"]
        self._keys[name] = (url, attempt.pop("finish_key"))
        if attempt["heartbeat_s"]:
            heartbeats = self._send_heartbeats(
                name, f"{url}/attempts/{name}/heartbeat", attempt["heartbeat_s"]
            )
            self._heartbeats[name] = asyncio.create_task(heartbeats)
        end = time.monotonic() + attempt["deadline_s"] + BLOCKED_S
        if self._alarm is not None and end < self._alarm:
            self._set_alarm(end)
        self._agents.call_soon_threadsafe(self._episodes.start, name, attempt["task"], attempt)

    async def _send_heartbeats(self, attempt: str, url: str, interval_s: float) -> None:
        """Send heartbeats until the gateway has ended the attempt; then cancel the episode."""
        try:
            while True:
                await asyncio.sleep(interval_s)
                await self._call(url, self._key, self._identity)
        except GatewayError as error:
            self._tell_once(f"the gateway ended an attempt: {error}")
            self._drop(attempt)

    def _drop(self, attempt: str) -> None:
        """Cancel the episode of an attempt that the gateway has ended."""
        self._keys.pop(attempt, None)
        self._agents.call_soon_threadsafe(self._episodes.cancel, attempt)

    async def guard(self) -> None:
        """End the process if an agent blocks its event loop, or the interpreter, beyond its deadline.

        A timer that needs no interpreter then writes the stack of each thread to stderr.
        """
        self._alarm = math.inf
        while True:
            jobs, now = list(self._episodes.jobs.values()), time.monotonic()
            for job in jobs:
                if now - job.deadline > LATE_S:
                    why = "the agent blocked its process beyond its deadline"
                    self._on_event({"job": job.id, "event": "done", "outcome": "timeout", "error": why})
            self._set_alarm(min((job.deadline for job in jobs), default=math.inf) + BLOCKED_S)
            await asyncio.sleep(GUARD_S)

    def _set_alarm(self, end: float) -> None:
        if end == self._alarm:
            return
        self._alarm = end
        faulthandler.cancel_dump_traceback_later()
        if end < math.inf:
            faulthandler.dump_traceback_later(max(end - time.monotonic(), 0.01), exit=True, file=2)

    def _emit(self, event: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._on_event, event)

    def _on_event(self, event: dict[str, Any]) -> None:
        """Finish an attempt whose episode has ended."""
        attempt = event.pop("job")
        del event["event"]
        if (heartbeats := self._heartbeats.pop(attempt, None)) is not None:
            heartbeats.cancel()
        self._freed.set()
        if (access := self._keys.pop(attempt, None)) is not None:
            task = asyncio.create_task(self._finish(attempt, *access, event))
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)

    async def _finish(self, attempt: str, url: str, key: str, result: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(FINISH_S):
                await self._call(f"{url}/s/{attempt}/finish", key, result)
        except GatewayError as error:
            if error.status not in DELETED:
                self._tell_once(f"an attempt could not be finished: {error}")
        except TimeoutError:
            self._tell(f"an attempt could not be finished: no response for {FINISH_S:g} s")

    def _tell_once(self, text: str) -> None:
        """Show a line, unless it equals the previous one."""
        if text != self._told:
            self._told = text
            self._tell(text)

    async def _call(self, url: str, key: str, body: dict[str, Any]) -> Any:
        """Send a request, again after each failed connection or status of 500 and more.

        Raises GatewayError if it is refused.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(WAIT_S + RESPONSE_S):
                    answer = await self._send(url, key, body)
                if self._lost:
                    self._tell(f"connected to {self._url} again")
                    self._lost = False
                return answer
            except (aiohttp.ClientError, OSError) as error:  # OSError: also a TimeoutError
                if not self._lost:
                    self._tell(f"no connection to {self._url} ({error or 'no response'}); trying again")
                    self._lost = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _send(self, url: str, key: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        async with self._http.post(url, data=data, headers=headers) as response:
            content = await response.read()
            if response.status >= 500:
                raise aiohttp.ClientError(f"status {response.status}")
            answer = json.loads(content)
            if response.status >= 400:
                raise GatewayError(answer["error"]["message"], status=response.status)
            return answer


async def serve(
    url: str, key: str, agent: Agent, concurrency: int, name: str | None = None, *, owned: bool = False
) -> None:
    """Run a worker until SIGINT, SIGTERM or, if it is `owned`, its parent's exit.

    What agents print goes to stderr, within a limit.
    """
    stderr = sys.stderr
    sys.stdout = sys.stderr = CappedLog(stderr)

    def tell(text: str) -> None:
        print(f"tidegate worker: {text}", file=stderr, flush=True)

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if owned:
        end_with_parent(lambda: loop.call_soon_threadsafe(stop.set))
    worker = AttemptRunner(url, key, agent, concurrency, tell, name)
    if not owned:
        tell(f"{worker.name} takes up to {concurrency} attempts at a time from {url}")
    guarding = asyncio.create_task(worker.guard(), name="guard")
    try:
        await worker.run(stop)
    finally:
        guarding.cancel()
