"""CPU time per byte of published weights, in the trainer's process: files, differences and sending."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from pathlib import Path

import broadcast
import differences

BUCKET_MB = 32
VERSIONS = 4
Costs = dict[str, float]


def file_costs(base: Path, directory: Path) -> Costs:
    """Costs of writing all weights, and a difference of an RL-size update, both in bfloat16."""
    versions = differences.of_rl_size(base, VERSIONS)
    row = differences.compare("RL size", versions, "bfloat16", directory)
    size = row["full_mb"] * 1e6
    return {
        "publish_full_byte_s": row["full_write_cpu_s"] / size,
        "publish_difference_byte_s": row["difference_write_cpu_s"] / size,
        "difference_share": row["bytes"],
    }


def send_costs(base: Path, directory: Path, hidden: int, rounds: int) -> Costs:
    """Costs of sending: all weights to one engine and to two, and a difference to one and to sixteen."""
    one, two = (_broadcast_s(directory / f"engines-{count}", hidden, count, rounds) for count in (1, 2))
    fan = asyncio.run(differences.fan_out(differences.of_rl_size(base, 10**6), directory / "fan", rounds))
    more = (fan["sixteen_cpu_s"] - fan["one_cpu_s"]) / (differences.ENGINES - 1)
    return {
        "broadcast_gather_byte_s": max(0.0, 2 * one - two),
        "broadcast_byte_s": two - one,
        "broadcast_difference_byte_s": more / (fan["difference_mb"] * 1e6),
    }


def _broadcast_s(directory: Path, hidden: int, engines: int, rounds: int) -> float:
    """CPU seconds per byte of a publish to so many engines over process groups."""
    directory.mkdir(parents=True)
    options = argparse.Namespace(hidden=hidden, engines=engines, rounds=rounds, bucket_mb=BUCKET_MB)

    async def run() -> float:
        async with contextlib.AsyncExitStack() as stack:
            size, taken = await broadcast.measured(options, directory, stack)
        return float(statistics.median(row["cpu_s"] for row in taken[broadcast.WAYS[0]]) / size)

    return asyncio.run(run())
