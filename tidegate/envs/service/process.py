"""Owns one worker process of the environment service: starts it, calls it and kills it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from tidegate.envs.service import frames
from tidegate.errors import ConfigError, StartError, TidegateError
from tidegate.service.process import OwnedProcess

log = logging.getLogger("tidegate.envs.service.process")

READY_S = 120.0
PING_S = 0.5
UNRESPONSIVE_S = 2.0
"""Time without an answer after which a worker gets no new work: code in it holds the interpreter's lock."""
CANCEL_S = 1.0
"""Time that a cancelled call may take to end before it counts as stuck."""
LAST_WORDS_S = 1.0
"""Time between the end of a process and that of its stream, in either order."""


class WorkerLostError(TidegateError):
    """A worker process ended while a call of it ran, or was killed."""


class CallError(TidegateError):
    """A call failed in the worker; `kind` is the kind of the failure."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class CallTimeoutError(TidegateError):
    """A call took longer than its deadline. The worker is unusable for new work if it is `stuck`."""

    def __init__(self, message: str, *, stuck: bool) -> None:
        super().__init__(message)
        self.stuck = stuck


class _Call:
    __slots__ = ("answer", "started")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.answer: asyncio.Future[dict[str, Any]] = loop.create_future()


class WorkerProcess(OwnedProcess):
    """One worker process.

    Attributes:
        episodes: Names of the episodes whose state it has.
        scoring: Number of rewards that it computes.
        retired: It gets no new work, and ends when its episodes have.
    """

    def __init__(self, number: int, settings: Mapping[str, Any]) -> None:
        super().__init__(f"environment worker {number}", None)
        self.number = number
        self.episodes: set[str] = set()
        self.scoring = 0
        self.retired = False
        self.about: dict[str, Any] = {}
        self._settings = settings
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._pinged = self._answered = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.exited = asyncio.Event()
        self._ending = False
        """Whether the process or its stream has ended, of which the other soon does."""

    async def start(self) -> None:
        """Starts the process and waits until its environments are loaded.

        Raises:
            ConfigError: They cannot be loaded.
            StartError: It exits, or takes longer than READY_S.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "tidegate.envs.service.worker", str(theirs.fileno())]
        try:
            with theirs:
                await self._spawn(command, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        self._writer.write(frames.pack(dict(self._settings)))
        try:
            about = await asyncio.wait_for(frames.read(reader), READY_S)
        except TimeoutError:
            late = self.not_ready(READY_S)
            await self.kill()
            raise StartError(f"{late}; it loads its environment first") from None
        except BaseException:  # nobody else would end it
            self._kill_group()
            self._writer.close()
            raise
        if about is None or "error" in about:
            how = await self.wait_for_exit() if about is None else ""
            await self.kill()
            raise StartError(f"{how}; see the log") if about is None else ConfigError(about["error"])
        self.about = about["environments"]
        self._answered = time.monotonic()
        self._reading = asyncio.create_task(self._read(reader), name=f"{self.title} reader")
        self._pinging = asyncio.create_task(self._ping(), name=f"{self.title} pings")

    def silent_s(self) -> float:
        """Returns for how many seconds a ping has not been answered; 0 if the last one was."""
        return time.monotonic() - self._pinged if self._pinged > self._answered else 0.0

    @property
    def responsive(self) -> bool:
        """Whether it runs and answers pings."""
        return not self._ending and self.silent_s() <= UNRESPONSIVE_S

    async def call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        """Runs an operation in the worker; its deadline starts when its code begins to run.

        Raises:
            CallError: It failed.
            CallTimeoutError: It took longer than `timeout_s`; it was cancelled.
            WorkerLostError: The process ended.
        """
        number, call = next(self._numbers), _Call()
        try:
            self._send({"id": number, "op": op, **arguments})
        except WorkerLostError:
            await self.exited.wait()  # how it ended is known then, within LAST_WORDS_S
            raise WorkerLostError(await self.wait_for_exit()) from None
        self._calls[number] = call
        try:
            begins: set[asyncio.Future[Any]] = {call.started, call.answer}
            await asyncio.wait(begins, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({call.answer}, timeout=timeout_s)
            if not call.answer.done() and not await self._cancel(number, call):
                raise CallTimeoutError(f"it took longer than {timeout_s:.3g} s", stuck=_stuck(call.answer))
            answer = call.answer.result()
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerLostError):
                self._send({"id": number, "op": "cancel"})
            raise
        finally:
            del self._calls[number]
            call.answer.cancel()
            call.started.cancel()
        if "error" in answer:
            raise CallError(answer["error"], answer["kind"])
        return answer["result"]

    async def _cancel(self, number: int, call: _Call) -> bool:
        """Cancels a call; returns whether it had a result nevertheless, as a setup that must not be lost."""
        with contextlib.suppress(WorkerLostError):  # of which the call learns
            self._send({"id": number, "op": "cancel"})
        await asyncio.wait({call.answer}, timeout=CANCEL_S)
        return call.answer.done() and call.answer.result().get("kind") != "cancelled"

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is None or self._ending or self._writer.is_closing():
            raise WorkerLostError(f"{self.title} has ended")
        self._writer.write(frames.pack(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Receives messages until the process ends; then its calls fail.

        The stream alone does not show the end: a process that was forked in the worker keeps it open.
        """
        receiving = asyncio.create_task(self._receive(reader), name=f"{self.title} messages")
        ending = asyncio.create_task(self.wait_for_exit(), name=f"{self.title} exit")
        try:
            await asyncio.wait((receiving, ending), return_when=asyncio.FIRST_COMPLETED)
            self._ending = True
            await asyncio.wait((receiving, ending), timeout=LAST_WORDS_S)
            self._kill_group()  # if it only closed its stream; and the processes that it started
            how = await ending
        finally:
            receiving.cancel()
            ending.cancel()
        if not receiving.cancelled() and receiving.done() and (error := receiving.exception()) is not None:
            log.error("%s sent a message that cannot be read", self.title, exc_info=error)
        self.exited.set()
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(WorkerLostError(how))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while (message := await frames.read(reader)) is not None:
            if message["id"] == 0:
                self._answered = time.monotonic()
            elif (call := self._calls.get(message["id"])) is None:
                continue
            elif message["event"] == "started":
                _settle(call.started, None)
            else:
                _settle(call.answer, message)

    async def _ping(self) -> None:
        while not self.exited.is_set():
            if self._answered >= self._pinged:
                self._pinged = time.monotonic()
                with contextlib.suppress(WorkerLostError):
                    self._send({"id": 0, "op": "ping"})
            await asyncio.sleep(PING_S)

    async def kill(self) -> None:
        """Kills the process and waits for its end; its calls raise WorkerLostError."""
        if self._pinging is not None:
            self._pinging.cancel()
        if self._process is not None and self._process.returncode is None:
            self._kill_group()
            await self._process.wait()
        if self._reading is not None:
            await asyncio.wait((self._reading,))
        if self._writer is not None:
            self._writer.close()

    def _kill_group(self) -> None:
        """Kills the process and those that it started, which have its process group."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _stuck(answer: asyncio.Future[dict[str, Any]]) -> bool:
    """Whether the code of a cancelled call still runs."""
    return not answer.done() or bool(answer.result().get("stuck"))


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
