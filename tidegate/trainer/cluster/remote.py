"""Proxies of processes that actors on other nodes own, with the interfaces of local processes.

Ray restarts a lost actor, possibly on another node; the proxy then starts the owned process again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from tidegate.errors import StartError
from tidegate.service.service import READY_S
from tidegate.trainer.cluster.actors import REPLY_TIMEOUT_S, LostError, wait_for_reply
from tidegate.trainer.cluster.environment import ClusterNode
from tidegate.trainer.cluster.file_transfer import FileBundle
from tidegate.trainer.processes.provider import CurrentWeights

LOST_S = 60.0
"""How long a lost actor may take to restart; its address and locks are free by then."""
PAUSE_S = 0.5

Send = Callable[[Path], Awaitable[FileBundle]]
"""Puts a directory's files into the object store."""


class RemoteProcess:
    """An actor and the state of its process."""

    def __init__(self, name: str, actor: Any, home: ClusterNode, logs: Path) -> None:
        self.name = name
        self.shares_run_dir = False
        """Whether the run's directory is visible to the actor."""
        self._actor = actor
        self._home = home
        self._logs = logs
        self._log_lock = asyncio.Lock()
        self._copied: dict[Path, int] = {}
        """Copied bytes of each log on its node. A restarted actor writes other logs."""

    async def _call(self, method: str, *arguments: object, within_s: float | None = REPLY_TIMEOUT_S) -> Any:
        """Call a method of the actor; raises the errors of `wait_for_reply`."""
        return await wait_for_reply(getattr(self._actor, method).remote(*arguments), self.name, within_s)

    async def connect(self, within_s: float) -> None:
        """Wait until the actor runs and check its node's versions. Raises StartError."""
        node, self.shares_run_dir = await self._call("about", within_s=within_s)
        mismatch = node.mismatch(self._home)
        if mismatch is not None:
            raise StartError(f"{self.name} cannot run: {mismatch}")

    async def gather_logs(self) -> None:
        """Append the new content of the node's logs to the run's. Raises StartError, OSError."""
        if self.shares_run_dir:
            return
        async with self._log_lock:  # else two calls would copy the same content
            contents: Mapping[Path, bytes] = await self._call("logs", self._copied)
            await asyncio.to_thread(self._write, contents)

    def _write(self, contents: Mapping[Path, bytes]) -> None:
        for file, text in contents.items():
            with (self._logs / file.name).open("ab") as log:
                log.write(text)
            self._copied[file] = self._copied.get(file, 0) + len(text)

    async def stop(self) -> None:
        with contextlib.suppress(StartError, OSError):  # a lost actor has ended
            await self._call("stop")
            await self.gather_logs()
            await self._call("clean_up")
        ray.kill(self._actor)

    async def restart_after_loss(self, start: Callable[[], Awaitable[object]]) -> None:
        """Start again after a loss, retrying for up to LOST_S. Raises StartError."""
        deadline = time.monotonic() + LOST_S
        while True:
            try:
                await start()
                return
            except StartError as error:
                if time.monotonic() > deadline or (isinstance(error, LostError) and error.for_good):
                    raise
            await asyncio.sleep(PAUSE_S)


class RemoteServer(RemoteProcess):
    """An engine, a gateway or an agents' process (`ServerProcess`)."""

    def __init__(
        self,
        name: str,
        actor: Any,
        home: ClusterNode,
        logs: Path,
        *,
        live: CurrentWeights | None = None,
        snapshot_weights: CurrentWeights | None = None,
        send: Send | None = None,
        port: int | None = None,
        ready_s: float = READY_S,
    ) -> None:
        """Create an engine or a gateway.

        A `port` keeps the address across restarts. An engine needs `live`, the weights to start with,
        `snapshot_weights`, a copy of them that is kept during a long start, and `send`.
        """
        super().__init__(name, actor, home, logs)
        self.url = ""
        self.restarts = 0
        self._live, self._snapshot_weights, self._send = live, snapshot_weights, send
        self._port = port
        self._ready_s = ready_s
        self._last_line = ""
        self._lost = False

    async def start(self) -> str:
        await self.connect(self._ready_s)
        arguments = await self._start_arguments()
        self.url = await self._call("start", *arguments, within_s=self._ready_s + REPLY_TIMEOUT_S)
        if self._port is not None:
            # A restart must get the same address: agents and clients keep it.
            self._port = int(self.url.rpartition(":")[2])
        return self.url

    async def deliver(self, weights: Path) -> Path:
        if self.shares_run_dir or self._send is None:
            return weights
        bundle = await self._send(weights)
        path: Path = await self._call("fetch_weights", bundle, within_s=self._ready_s)
        return path

    async def _start_arguments(self) -> tuple[int, Path | FileBundle | None, int]:
        """Return those of `ServerActor.start`."""
        if self._live is None or self._snapshot_weights is None or self._send is None:
            return self._port or 0, None, 0
        if self.shares_run_dir:
            return 0, *self._snapshot_weights()
        weights, version = self._live()
        return 0, await self._send(weights), version

    async def wait_for_exit(self) -> str:
        """Wait for the server or its actor to exit; returns a message on how it did."""
        try:
            how, self._last_line = await self._call("wait_for_exit", within_s=None)
        except LostError as error:
            how, self._last_line, self._lost = f"the {error}", "see Ray's logs", True
        return str(how)

    async def restart(self) -> None:
        self.restarts += 1
        if self._lost:
            await self.restart_after_loss(self.start)
            self._lost = False
        else:
            await self.start()

    def last_log_line(self) -> str:
        return self._last_line


class RemoteRank(RemoteProcess):
    """A trainer rank (`RankProcess`)."""

    def __init__(self, name: str, actor: Any, home: ClusterNode, logs: Path, rank: int) -> None:
        super().__init__(name, actor, home, logs)
        self.rank = rank

    async def start(self) -> None:
        """Start the rank. Raises StartError, also if its node does not see the run's directory."""
        await self.connect(READY_S)
        if not self.shares_run_dir:
            raise StartError(
                f"trainer rank {self.rank} does not see {self._logs.parent}: trainer ranks need it on a disk "
                "that their nodes share (run.dir), or must be on one node"
            )
        await self._call("start", within_s=READY_S + REPLY_TIMEOUT_S)

    def send(self, message: object) -> None:
        """Send a message without waiting; `wait_for_exit` reports an exited rank."""
        self._actor.send.remote(message)

    async def wait_for_exit(self) -> str:
        try:
            return str(await self._call("wait_for_exit", within_s=None))
        except LostError as error:
            return f"trainer rank {self.rank}: {error}"
