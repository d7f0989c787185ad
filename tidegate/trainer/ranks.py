"""The ranks of a trainer: rank 0 is the run's own process, the others are followers that it owns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.config import TrainerSettings
from tidegate.errors import StartError, TrainingError, unwrapped
from tidegate.services import signal_child
from tidegate.trainer.batch import Row
from tidegate.trainer.follower import HOST, JOIN_S, READY, Opening
from tidegate.trainer.policy import Learner, Policy
from tidegate.trainer.sharded import ShardedPolicy

READY_S = 120.0
STOP_S = 8.0
PATIENCE_S = 600.0
"""How long a rank waits for the others in the middle of a step, before it takes them for lost."""
LAST_WORDS_S = 5.0
"""How soon one hears of the death that broke a collective."""

Watch = Callable[[Coroutine[Any, Any, None], str], object]


class Follower:
    """One rank's process, from its start to its end. Its log is `logs/trainer-<rank>.log`."""

    def __init__(self, rank: int, logs: Path) -> None:
        self.rank = rank
        self.log = logs / f"trainer-{rank}.log"
        self._commands: BinaryIO | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it is ready to be told. Raises StartError.

        It is ended by the kernel, too, when this process dies: in a collective it reads no input.
        """
        theirs, ours = os.pipe()
        self._commands = os.fdopen(ours, "wb")
        tether = [sys.executable, "-m", "tidegate.tether", str(os.getpid())]
        try:
            with await asyncio.to_thread(self.log.open, "ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *tether, sys.executable, "-m", "tidegate.trainer.follower",
                    stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(theirs)
        assert self._process.stdout is not None
        try:
            said = await asyncio.wait_for(self._process.stdout.readline(), READY_S)
        except TimeoutError:
            raise StartError(f"trainer rank {self.rank} was not ready after {READY_S:g} s") from None
        if said != READY:
            raise StartError(await self.died())

    def tell(self, message: object) -> None:
        """Raises BrokenPipeError where it is dead."""
        assert self._commands is not None
        pickle.dump(message, self._commands)
        self._commands.flush()

    async def died(self) -> str:
        """Wait for its end; returns how it ended, in words."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        words = f"; its last words: {lines[-1].strip()}" if lines and code > 0 else ""
        return f"trainer rank {self.rank} {how}{words} (log: {self.log})"

    async def stop(self) -> None:
        """Let it end by itself; kill it if it does not within STOP_S."""
        if self._commands is not None:
            with contextlib.suppress(BrokenPipeError):
                self._commands.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            signal_child(self._process, signal.SIGKILL)
            await self._process.wait()


class Ranks:
    """A trainer's followers: none where `settings.ranks` is 1."""

    def __init__(self, settings: TrainerSettings, logs: Path, patience_s: float = PATIENCE_S) -> None:
        self.settings = settings
        self.followers = [Follower(rank, logs) for rank in range(1, settings.ranks)]
        self._patience_s = patience_s
        self._failure: str | None = None
        self._failed = threading.Event()

    async def open(self, model: Path, seed: int, watch: Watch) -> Learner:
        """The policy, on as many ranks as the settings say; `watch` is given a job that raises TrainingError
        when one of them dies. Raises StartError."""
        if not self.followers:
            return await asyncio.to_thread(Policy.load, model, self.settings, seed)
        try:
            async with asyncio.TaskGroup() as together:
                for follower in self.followers:
                    together.create_task(follower.start())
        except ExceptionGroup as failures:
            raise unwrapped(failures) from None
        for follower in self.followers:
            watch(self._watch(follower), f"trainer rank {follower.rank}")
        return await asyncio.to_thread(self._open, model, seed)

    def _open(self, model: Path, seed: int) -> Lead:
        store = dist.TCPStore(
            HOST, 0, self.settings.ranks, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
        )  # fmt: skip
        opening = Opening(self.settings, model, seed, store.port, self._patience_s)
        with self._errors():
            for follower in self.followers:
                follower.tell((follower.rank, opening))
            return Lead(opening.join(0, store), self)

    async def _watch(self, follower: Follower) -> None:
        how = await follower.died()
        self._failure = self._failure or f"{how}. Go on from the last checkpoint with --resume"
        self._failed.set()
        raise TrainingError(self._failure)

    @contextlib.contextmanager
    def together(self, method: str, *arguments: object) -> Iterator[None]:
        """Have the followers do the same as the caller is about to. Raises TrainingError where one is dead,
        or where the ranks lost each other."""
        if self._failure is not None:
            raise TrainingError(self._failure)
        with self._errors():
            for follower in self.followers:
                follower.tell((method, arguments))
            yield

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, BrokenPipeError) as error:
            # A collective says that a connection broke; which process it was is known a moment later.
            self._failed.wait(LAST_WORDS_S)
            if self._failure is None:
                self._failure = f"the trainer's ranks lost each other: {type(error).__name__}: {error}"
            raise TrainingError(self._failure) from error

    async def close(self) -> None:
        """End all followers."""
        await asyncio.gather(*(follower.stop() for follower in self.followers))
        if self.followers and dist.is_initialized():
            dist.destroy_process_group()


class Lead:
    """A policy of several ranks as the run sees it: what it is asked for, all ranks do."""

    def __init__(self, policy: ShardedPolicy, ranks: Ranks) -> None:
        self.policy = policy
        self._ranks = ranks

    @property
    def non_finite(self) -> list[str]:
        return self.policy.non_finite

    def add(self, rows: Sequence[Row], version: int) -> None:
        with self._ranks.together("add", rows, version):
            self.policy.add(rows, version)

    def finish(self) -> dict[str, float]:
        with self._ranks.together("finish"):
            return self.policy.finish()

    def save_weights(self, directory: Path, *, durable: bool = False) -> Path:
        with self._ranks.together("save_weights", directory):
            return self.policy.save_weights(directory, durable=durable)

    def weights(self) -> dict[str, Tensor]:
        with self._ranks.together("weights"):
            return self.policy.weights()

    def save_state(self, path: Path) -> None:
        with self._ranks.together("save_state", path):
            self.policy.save_state(path)

    def load_weights(self, directory: Path) -> None:
        with self._ranks.together("load_weights", directory):
            self.policy.load_weights(directory)

    def load_state_from(self, path: Path) -> None:
        with self._ranks.together("load_state_from", path):
            self.policy.load_state_from(path)
