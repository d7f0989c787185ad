"""The ranks of a trainer: rank 0 is the run's own process, the others are followers that it owns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.config import TrainerSettings
from tidegate.errors import TidegateError, TrainingError, unwrapped
from tidegate.service.service import LOOPBACK
from tidegate.trainer.batch.rows import TrainSequence
from tidegate.trainer.distributed.fsdp import ShardedPolicy
from tidegate.trainer.distributed.rank_main import JOIN_S, RankInit
from tidegate.trainer.policy.policy import Learner, Policy
from tidegate.trainer.processes.rank_process import PATIENCE_S, RankProcess

LAST_WORDS_S = 5.0
"""How soon one hears of the death that broke a collective."""
LEAVE_S = 10.0
HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""In what torch says where the host has none left: a RuntimeError like any other."""

Watch = Callable[[Coroutine[Any, Any, None], str], object]


class Ranks:
    """A trainer's followers: none where `settings.ranks` is 1. They meet at `host`, which is this process's
    node as the others see it."""

    def __init__(
        self,
        settings: TrainerSettings,
        followers: Sequence[RankProcess],
        host: str = LOOPBACK,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.settings = settings
        self.followers = followers
        self._host = host
        self._patience_s = patience_s
        self._failure: str | None = None
        self._failed = threading.Event()

    async def open(self, model: Path, seed: int, watch: Watch) -> Learner:
        """The policy, on as many ranks as the settings say; `watch` is given a job that raises TrainingError
        when one of them dies. Raises StartError."""
        if not self.followers:
            return await asyncio.to_thread(SingleRank.load, model, self.settings, seed)
        try:
            async with asyncio.TaskGroup() as together:
                for follower in self.followers:
                    together.create_task(follower.start())
        except ExceptionGroup as failures:
            raise unwrapped(failures) from None
        for follower in self.followers:
            watch(self._watch(follower), f"trainer rank {follower.rank}")
        return await asyncio.to_thread(self._open, model, seed)

    def _open(self, model: Path, seed: int) -> RankZeroPolicy:
        store = dist.TCPStore(
            self._host, 0, self.settings.ranks, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
        )  # fmt: skip
        opening = RankInit(self.settings, model, seed, (self._host, store.port), self._patience_s)
        with self._errors():
            for follower in self.followers:
                follower.tell((follower.rank, opening))
            return RankZeroPolicy(opening.join(0, store), self)

    async def _watch(self, follower: RankProcess) -> None:
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
        """After an error that leaves the ranks out of step nothing more is asked of them: those that are
        alive stand in collectives that nobody joins."""
        try:
            yield
        except TidegateError:
            raise  # by all of them alike
        except (RuntimeError, MemoryError, ConnectionError, TimeoutError) as error:
            raise TrainingError(self._lost(error)) from error
        except OSError:
            raise  # rank 0 reads and writes files when nothing is left that is done together
        except Exception as error:
            self._lost(error)
            raise

    def _lost(self, error: Exception) -> str:
        """What went wrong, which is the run's failure unless it had one before."""
        what = f"{type(error).__name__}: {error}"
        if (memory := out_of_memory(error, self.settings)) is not None:
            what = f"trainer rank 0 is {memory}"
        elif isinstance(error, TimeoutError):  # its words are those of a follower's owner
            what = str(error)
        elif isinstance(error, (RuntimeError, ConnectionError)):
            # A collective says that a connection broke; which process it was is known a moment later.
            self._failed.wait(LAST_WORDS_S)
            what = f"the trainer's ranks lost each other: {what}"
        else:
            what = f"trainer rank 0 failed in the middle of a step: {what}"
        self._failure = self._failure or what
        return self._failure

    async def close(self) -> None:
        """End all followers, and leave the group: within LEAVE_S, for those who died may be waited for."""
        await asyncio.gather(*(follower.stop() for follower in self.followers))
        if self.followers and dist.is_initialized():
            # Not asyncio's own threads: the process would wait for them at its end.
            leaving = threading.Thread(target=dist.destroy_process_group, name="leaving", daemon=True)
            leaving.start()
            await asyncio.to_thread(leaving.join, LEAVE_S)


class SingleRank(Policy):
    """A policy of one rank as the run sees it."""

    def add(self, rows: Sequence[TrainSequence], version: int) -> None:
        with self._memory():
            super().add(rows, version)

    def finish(self) -> dict[str, float]:
        with self._memory():
            return super().finish()

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        """Raises TrainingError where there is none left."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            why = out_of_memory(error, self.settings)
            if why is None:
                raise
            raise TrainingError(f"the trainer is {why}") from error


def out_of_memory(error: Exception, settings: TrainerSettings) -> str | None:
    """That an error means so, and what to do; None where it means something else."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and HOST_MEMORY not in str(error):
        return None
    said = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"out of memory on {settings.device}: {said[0]}; lower trainer.microbatch_tokens (it is "
        f"{settings.microbatch_tokens}) and go on with --resume"
    )


class RankZeroPolicy:
    """A policy of several ranks as the run sees it: what it is asked for, all ranks do."""

    def __init__(self, policy: ShardedPolicy, ranks: Ranks) -> None:
        self.policy = policy
        self._ranks = ranks

    @property
    def non_finite(self) -> list[str]:
        return self.policy.non_finite

    def add(self, rows: Sequence[TrainSequence], version: int) -> None:
        with self._ranks.together("add", rows, version):
            self.policy.add(rows, version)

    def finish(self) -> dict[str, float]:
        with self._ranks.together("finish"):
            return self.policy.finish()

    def save_weights(self, directory: Path, *, durable: bool = False) -> Path:
        with self._ranks.together("save_weights", directory):
            return self.policy.save_weights(directory, durable=durable)

    def weight_buckets(self, most_bytes: int) -> Generator[dict[str, Tensor], None, None]:
        """Whoever asks for fewer than all of them has to close it: the followers gather all."""
        with self._ranks.together("help_with_weights", most_bytes):
            found = self.policy.weight_buckets(most_bytes)
            try:
                for bucket in found:  # noqa: UP028 - closing this one must not close that one
                    yield bucket
            finally:
                for _ in found:
                    pass

    def save_state(self, path: Path) -> None:
        with self._ranks.together("save_state", path):
            self.policy.save_state(path)

    def load_weights(self, directory: Path) -> None:
        with self._ranks.together("load_weights", directory):
            self.policy.load_weights(directory)

    def load_state_from(self, path: Path) -> None:
        with self._ranks.together("load_state_from", path):
            self.policy.load_state_from(path)
