"""Main program of a trainer rank other than 0: executes the calls that rank 0 sends to its standard input.

Rank 0 starts it. It exits when its standard input closes, which happens when rank 0 exits.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from tidegate.config import TrainerSettings
from tidegate.errors import TidegateError
from tidegate.trainer.distributed.fsdp import FSDPRanks
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.processes.rank_process import READY

JOIN_S = 120.0


@dataclass(frozen=True, slots=True)
class RankInit:
    """Arguments with which every rank joins the process group and loads its policy."""

    settings: TrainerSettings
    model: Path
    seed: int
    address: tuple[str, int]
    """Host and port of rank 0's store."""
    timeout_s: float
    """Timeout of collective operations."""

    def join(
        self,
        rank: int,
        store: dist.Store | None = None,
        call: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext(),
        translate: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Policy:
        """Join the process group and load this rank's shards; raises StartError.

        `call` and `translate` are those of `FSDPRanks`.
        """
        ranks = self.settings.ranks
        store = store or dist.TCPStore(*self.address, ranks, timeout=timedelta(seconds=JOIN_S))
        # On a GPU, too: pickled objects are exchanged in host memory.
        backend = "cpu:gloo"
        if self.settings.device == "cuda":
            torch.cuda.set_device(
                rank if torch.cuda.device_count() > 1 else 0
            )  # 0: only its own GPU is visible
            backend = "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=self.timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        own = FSDPRanks(self.settings, store, call, translate)
        return Policy.load(self.model, self.settings, self.seed, own)


def execute(commands: BinaryIO) -> None:
    """Execute pickled commands to their end: `(rank, RankInit)`, then `(method, arguments, options)`."""
    try:
        rank, init = pickle.load(commands)
        policy: Policy = init.join(rank)
        while True:
            method, arguments, options = pickle.load(commands)
            try:
                result = getattr(policy, method)(*arguments, **options)
                if isinstance(result, Generator):
                    for _ in result:
                        pass
            except TidegateError as error:  # rank 0 raises and handles the same error
                print(f"{method}: {error}", file=sys.stderr, flush=True)
    except EOFError:
        return


def main() -> None:
    ready_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries goes to the log
    os.write(ready_fd, READY)
    os.close(ready_fd)
    execute(sys.stdin.buffer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
