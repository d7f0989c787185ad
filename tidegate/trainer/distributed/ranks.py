"""Starts the trainer's ranks: rank 0 is the run's process, which owns the processes of the others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tidegate.config import TrainerSettings
from tidegate.errors import TidegateError, TrainingError
from tidegate.service.process import run_together
from tidegate.service.service import LOOPBACK
from tidegate.trainer.distributed.rank_main import JOIN_S, RankInit
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.policy.ranks import out_of_memory
from tidegate.trainer.processes.rank_process import COLLECTIVE_TIMEOUT_S, RankProcess

EXIT_REPORT_S = 5.0
"""How long to wait for the report of an exited rank after a collective failed."""
LEAVE_S = 10.0

Watch = Callable[[Coroutine[Any, Any, None], str], object]


class RankProcesses:
    """Owns the processes of ranks 1 and up, if any.

    `host` is the address of this node as the other ranks reach it, `timeout_s` that of collective operations.
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

    async def open(self, model: Path, seed: int, watch: Watch) -> Policy:
        """Load the policy on all ranks; raises StartError.

        `watch` receives, for each process, a coroutine that raises TrainingError when it exits.
        """
        if not self.processes:
            return await asyncio.to_thread(Policy.load, model, self.settings, seed)
        await run_together(process.start() for process in self.processes)
        for process in self.processes:
            watch(self._watch(process), f"trainer rank {process.rank}")
        return await asyncio.to_thread(self._open, model, seed)

    def _open(self, model: Path, seed: int) -> Policy:
        store = dist.TCPStore(
            self._host, 0, self.settings.ranks, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
        )  # fmt: skip
        init = RankInit(self.settings, model, seed, (self._host, store.port), self._timeout_s)
        with self._translate_errors():
            for process in self.processes:
                process.send((process.rank, init))
            return init.join(0, store, self.collective, self._translate_errors)

    async def _watch(self, process: RankProcess) -> None:
        how = await process.wait_for_exit()
        self._failure = self._failure or f"{how}. Go on from the last checkpoint with --resume"
        self._failed.set()
        raise TrainingError(self._failure)

    @contextlib.contextmanager
    def collective(
        self, method: str, *arguments: object, shares: Sequence[object] | None = None, **options: object
    ) -> Iterator[None]:
        """Send the call that the caller makes on rank 0 to the other ranks too.

        Each rank gets its own item of `shares` as the first argument, and no other item. Raises TrainingError
        if a rank has exited or the ranks lost their connections.
        """
        if self._failure is not None:
            raise TrainingError(self._failure)
        with self._translate_errors():
            for process in self.processes:
                own = () if shares is None else (shares[process.rank],)
                process.send((method, (*own, *arguments), options))
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
