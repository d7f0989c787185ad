"""Measures what rank 0 sends to the other trainer ranks for a batch: bytes, and the time that it takes.

The other ranks are processes that read and unpickle their calls and compute nothing. The batch is sent in
two ways by turns: to each rank its share, and to each rank all rows. The time is that of rank 0 from
splitting the rows until the last byte is written; medians of the rounds.

    python benchmarks/ranks.py [--json] [--rounds 7] [--rows 256] [--tokens 4096]
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Check, report

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.batch.share import RankShare, split_share
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.processes.rank_process import LocalRankProcess

READ = "import pickle, sys\nprint('ready', flush=True)\nwhile True: pickle.load(sys.stdin.buffer)"


class Reader(LocalRankProcess):
    """A rank that computes nothing; counts the bytes sent to it if `counts` is set."""

    counts = False
    sent = 0

    def command(self) -> Sequence[str]:
        return (sys.executable, "-c", READ)

    def send(self, message: object) -> None:
        if self.counts:
            self.sent += len(pickle.dumps(message))
        else:
            super().send(message)


def make_rows(number: int, tokens: int) -> list[TrainingSequence]:
    """Rows of equal length; the last half of each is trained."""
    rng = np.random.default_rng(0)
    mask = np.arange(tokens) >= tokens // 2
    return [
        TrainingSequence(
            ids=rng.integers(0, 150_000, tokens).astype(np.int32),
            mask=mask.copy(),
            logprobs=np.where(mask, -rng.exponential(1.0, tokens), 0).astype(np.float32),
            versions=np.where(mask, 1, -1),
            temperature=np.ones(tokens, dtype=np.float32),
            advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            group_id=f"g{index // 8}",
            session_id=f"s{index}",
        )
        for index in range(number)
    ]


def send(ranks: RankProcesses, rows: list[TrainingSequence], way: str) -> None:
    """Send the call of a batch's forward and backward passes."""
    if way == "all rows":
        with ranks.collective("backward", rows, 0):
            return
    whole = RankShare(rows, frozenset(row.group_id for row in rows), sum(row.trained for row in rows), 1.0)
    shares = [[share] for share in split_share(whole, ranks.settings.ranks, ranks.settings.microbatch_tokens)]
    with ranks.collective("backward_shares", 0, shares=shares):
        return


async def measure(count: int, rows: list[TrainingSequence], rounds: int, logs: Path) -> list[dict[str, Any]]:
    """Send the rows with `count` ranks in both ways; returns a result for each."""
    processes = [Reader(rank, logs) for rank in range(1, count)]
    ranks = RankProcesses(TrainerSettings(ranks=count), processes)
    seconds: dict[str, list[float]] = {"share": [], "all rows": []}
    sent = {}
    try:
        await asyncio.gather(*(process.start() for process in processes))
        for _ in range(rounds + 1):
            for way, taken in seconds.items():
                began = time.perf_counter()
                await asyncio.to_thread(send, ranks, rows, way)
                taken.append(time.perf_counter() - began)
        for way in seconds:
            for process in processes:
                process.counts, process.sent = True, 0
            send(ranks, rows, way)
            sent[way] = sum(process.sent for process in processes)
    finally:
        await ranks.close()
    return [
        {"ranks": count, "way": way, "mb": sent[way] / 1e6, "ms": 1000 * statistics.median(taken[1:])}
        for way, taken in seconds.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds")
    parser.add_argument("--rows", type=int, default=256, help="rows of the batch")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a row")
    options = parser.parse_args()
    rows = make_rows(options.rows, options.tokens)
    batch = len(pickle.dumps(rows)) / 1e6
    results, checks = [{"batch_mb": batch}], []
    with tempfile.TemporaryDirectory(prefix="tidegate-ranks-") as name:
        for count in (2, 4):
            found = asyncio.run(measure(count, rows, options.rounds, Path(name)))
            results += found
            goal = 1.05 * batch * (count - 1) / count
            checks.append(Check(f"MB sent as shares, {count} ranks", found[0]["mb"], "<=", goal))
    return report(results, checks, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
