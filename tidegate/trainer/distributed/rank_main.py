"""A trainer rank other than the first: it does what rank 0 does, as it is told through its standard input.

Nobody starts it but rank 0, whose end it does not outlive: its standard input ends then.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from tidegate.config import TrainerSettings
from tidegate.errors import TidegateError
from tidegate.trainer.distributed.fsdp import ShardedPolicy
from tidegate.trainer.processes.rank_process import READY

JOIN_S = 120.0


@dataclass(frozen=True, slots=True)
class RankInit:
    """What the ranks of a trainer agree on before anything else."""

    settings: TrainerSettings
    model: Path
    seed: int
    address: tuple[str, int]
    """Of rank 0's store, at which the ranks meet."""
    patience_s: float
    """How long a rank waits for the others in the middle of something."""

    def join(self, rank: int, store: dist.Store | None = None) -> ShardedPolicy:
        """Meet the other ranks, and load this one's part of the model. Raises StartError."""
        ranks = self.settings.ranks
        store = store or dist.TCPStore(*self.address, ranks, timeout=timedelta(seconds=JOIN_S))
        backend = "cpu:gloo"
        if self.settings.device == "cuda":
            torch.cuda.set_device(rank if torch.cuda.device_count() > 1 else 0)  # 0: it sees its own alone
            backend = "cpu:gloo,cuda:nccl"
        patience = timedelta(seconds=self.patience_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)
        return ShardedPolicy.load(self.model, self.settings, self.seed)


def follow(commands: BinaryIO) -> None:
    """Do as told until there is nothing more to be read: `(rank, Opening)`, then `(method, arguments)`."""
    try:
        rank, opening = pickle.load(commands)
        policy: Any = opening.join(rank)
        while True:
            method, arguments = pickle.load(commands)
            try:
                getattr(policy, method)(*arguments)
            except TidegateError as error:  # rank 0 raises the same, and knows what to do about it
                print(f"{method}: {error}", file=sys.stderr, flush=True)
    except EOFError:
        return


def main() -> None:
    said = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print belongs in the log
    os.write(said, READY)
    os.close(said)
    follow(sys.stdin.buffer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
