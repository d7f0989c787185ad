"""Starts the trainer's ranks: rank 0 is the run's process, which owns the processes of the others."""

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
from tidegate.trainer.processes.rank_process import COLLECTIVE_TIMEOUT_S, RankProcess

EXIT_REPORT_S = 5.0
"""How long to wait for the report of an exited rank after a collective failed."""
LEAVE_S = 10.0
HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Text of torch's RuntimeError when host memory is exhausted."""

Watch = Callable[[Coroutine[Any, Any, None], str], object]


class Ranks:
    """Owns the processes of ranks 1 and up, if any.

    Args:
        settings: the `[trainer]` settings.
        processes: one for each rank other than 0.
        host: address of this node as the other ranks reach it.
        timeout_s: timeout of collective operations, in seconds.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        processes: Sequence[RankProcess],
        host: str = LOOPBACK,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        self.settings = settings
        self.processes = processes
        self._host = host
        self._timeout_s = timeout_s
        self._failure: str | None = None
        self._failed = threading.Event()

    async def open(self, model: Path, seed: int, watch: Watch) -> Learner:
        """Load the policy on all ranks.

        `watch` receives, for each process, a coroutine that raises TrainingError when it exits.

        Raises:
            StartError: if a rank does not start or cannot load the model.
        """
        if not self.processes:
            return await asyncio.to_thread(SingleRank.load, model, self.settings, seed)
        try:
            async with asyncio.TaskGroup() as group:
                for process in self.processes:
                    group.create_task(process.start())
        except ExceptionGroup as failures:
            raise unwrapped(failures) from None
        for process in self.processes:
            watch(self._watch(process), f"trainer rank {process.rank}")
        return await asyncio.to_thread(self._open, model, seed)

    def _open(self, model: Path, seed: int) -> RankZeroPolicy:
        store = dist.TCPStore(
            self._host, 0, self.settings.ranks, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
        )  # fmt: skip
        init = RankInit(self.settings, model, seed, (self._host, store.port), self._timeout_s)
        with self._translate_errors():
            for process in self.processes:
                process.send((process.rank, init))
            return RankZeroPolicy(init.join(0, store), self)

    async def _watch(self, process: RankProcess) -> None:
        how = await process.wait_for_exit()
        self._failure = self._failure or f"{how}. Go on from the last checkpoint with --resume"
        self._failed.set()
        raise TrainingError(self._failure)

    @contextlib.contextmanager
    def collective(self, method: str, *arguments: object) -> Iterator[None]:
        """Send the call that the caller makes on rank 0 to the other ranks too.

        Raises TrainingError if a rank has exited or the ranks lost their connections.
        """
        if self._failure is not None:
            raise TrainingError(self._failure)
        with self._translate_errors():
            for process in self.processes:
                process.send((method, arguments))
            yield

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Refuse further calls after an error that occurred on rank 0 only.

        The other ranks then wait in a collective that rank 0 never joins.
        """
        try:
            yield
        except TidegateError:
            raise  # raised on all ranks
        except (RuntimeError, MemoryError, ConnectionError, TimeoutError) as error:
            raise TrainingError(self._record_failure(error)) from error
        except OSError:
            raise  # rank 0 accesses files after the last collective operation
        except Exception as error:
            self._record_failure(error)
            raise

    def _record_failure(self, error: Exception) -> str:
        """Record and return the run's failure; the first one counts."""
        what = f"{type(error).__name__}: {error}"
        if (memory := out_of_memory(error, self.settings)) is not None:
            what = f"trainer rank 0 is {memory}"
        elif isinstance(error, TimeoutError):  # raised by RankProcess.send
            what = str(error)
        elif isinstance(error, (RuntimeError, ConnectionError)):
            # The exit of the process that broke the connection is reported a moment later.
            self._failed.wait(EXIT_REPORT_S)
            what = f"the trainer's ranks lost each other: {what}"
        else:
            what = f"trainer rank 0 failed in the middle of a step: {what}"
        self._failure = self._failure or what
        return self._failure

    async def close(self) -> None:
        """Stop all processes and leave the process group, within LEAVE_S: NCCL may wait for exited ranks."""
        await asyncio.gather(*(process.stop() for process in self.processes))
        if self.processes and dist.is_initialized():
            # A daemon thread: the interpreter waits for asyncio's threads at exit.
            leaving = threading.Thread(target=dist.destroy_process_group, name="leaving", daemon=True)
            leaving.start()
            await asyncio.to_thread(leaving.join, LEAVE_S)


class SingleRank(Policy):
    """Policy of a trainer with a single rank."""

    def backward(self, rows: Sequence[TrainSequence], version: int) -> None:
        with self._translate_out_of_memory():
            super().backward(rows, version)

    def optimizer_step(self) -> dict[str, float]:
        with self._translate_out_of_memory():
            return super().optimizer_step()

    @contextlib.contextmanager
    def _translate_out_of_memory(self) -> Iterator[None]:
        """Raises TrainingError if memory is exhausted."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            why = out_of_memory(error, self.settings)
            if why is None:
                raise
            raise TrainingError(f"the trainer is {why}") from error


def out_of_memory(error: Exception, settings: TrainerSettings) -> str | None:
    """Describe an out-of-memory error and its remedy; None for other errors."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and HOST_MEMORY not in str(error):
        return None
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"out of memory on {settings.device}: {lines[0]}; lower trainer.microbatch_tokens (it is "
        f"{settings.microbatch_tokens}) and go on with --resume"
    )


class RankZeroPolicy:
    """Policy of a trainer with several ranks: forwards every call to all of them."""

    def __init__(self, policy: ShardedPolicy, ranks: Ranks) -> None:
        self.policy = policy
        self._ranks = ranks

    @property
    def non_finite(self) -> list[str]:
        return self.policy.non_finite

    def backward(self, rows: Sequence[TrainSequence], version: int) -> None:
        with self._ranks.collective("backward", rows, version):
            self.policy.backward(rows, version)

    def optimizer_step(self) -> dict[str, float]:
        with self._ranks.collective("optimizer_step"):
            return self.policy.optimizer_step()

    def save_weights(self, directory: Path, *, durable: bool = False) -> Path:
        with self._ranks.collective("save_weights", directory):
            return self.policy.save_weights(directory, durable=durable)

    def weight_buckets(self, max_bytes: int) -> Generator[dict[str, Tensor], None, None]:
        """Close the generator if you do not exhaust it: the other ranks gather all buckets."""
        with self._ranks.collective("gather_weight_buckets", max_bytes):
            all_buckets = self.policy.weight_buckets(max_bytes)
            try:
                for bucket in all_buckets:  # noqa: UP028 - closing this generator must not close the inner one
                    yield bucket
            finally:
                for _ in all_buckets:
                    pass

    def save_state(self, path: Path) -> None:
        with self._ranks.collective("save_state", path):
            self.policy.save_state(path)

    def load_weights(self, directory: Path) -> None:
        with self._ranks.collective("load_weights", directory):
            self.policy.load_weights(directory)

    def load_state_from(self, path: Path) -> None:
        with self._ranks.collective("load_state_from", path):
            self.policy.load_state_from(path)
