"""Measures the benefit of gathering one bucket of weights while another is sent: time, engine pause, memory.

Two trainer ranks share a random model and send it to embedded engines over gloo in three ways: gathering the
next bucket during each send; gathering all buckets first; and gathering all first, with engines that are
paused during the transfer, as required of engines without a staging buffer. The ways alternate in one run.
`publish_s` is the time of a whole publish, `gap_s` the pause of an engine, `held_mb` the peak memory growth
of rank 0.

Then it compares differences between versions with all weights (benchmarks/differences.py).

    python benchmarks/broadcast.py [--json] [--rounds 5] [--hidden 768] [--bucket-mb 32]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import differences
import torch
from common import Check, report
from transformers import Qwen3Config, Qwen3ForCausalLM

from tidegate.config import TrainerSettings
from tidegate.service.service import Service
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.processes.rank_process import rank_processes
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.publish.broadcast import WeightBroadcaster
from tidegate.trainer.publish.engine_control import EngineControl

Buckets = Generator[dict[str, torch.Tensor], None, None]
WAYS = ("one ahead", "all first", "all first, paused")


def make_model(directory: Path, hidden: int) -> int:
    """Saves a random Qwen3; returns its size in bytes, in float32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(one.numel() * one.element_size() for one in model.parameters())


class Timed(EngineControl):
    """Records when the engine paused and resumed. With `stages` False it is paused before an update begins,
    as engines that do not stage weights."""

    paused_at = resumed_at = 0.0
    stages = True

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        if path == "/begin_weight_update" and not self.stages:
            await self.pause()
        return await super().call(path, body, size)

    async def pause(self) -> None:
        await super().pause()
        if self.paused_at <= self.resumed_at:
            self.paused_at = time.perf_counter()

    async def resume(self) -> None:
        await super().resume()
        self.resumed_at = time.perf_counter()


@contextlib.contextmanager
def memory_peak() -> Iterator[dict[str, float]]:
    """Measures the peak memory growth of this process inside the block, in MB (Linux)."""
    found: dict[str, float] = {}
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that glibc holds would hide growth
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    yield found
    found["mb"] = _memory("VmHWM") - before


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


async def measured(options: argparse.Namespace, directory: Path, stack: contextlib.AsyncExitStack) -> Any:
    """Publishes in each way by turns; returns the model's bytes, and each way's figures of the rounds."""
    size = await asyncio.to_thread(make_model, directory / "model", options.hidden)
    settings = TrainerSettings(ranks=2)
    guard = TaskSupervisor()
    stack.push_async_callback(guard.close)
    (directory / "logs").mkdir()
    ranks = RankProcesses(settings, rank_processes(settings.ranks, directory / "logs"))
    stack.push_async_callback(ranks.close)
    command = ["--model.path", str(directory / "model"), "--engine.max_slots=4", "--engine.max_context=256"]
    engines = [
        Service("engine", lambda: command, directory, name=f"engine-{number}")
        for number in range(options.engines)
    ]
    for engine in engines:
        stack.push_async_callback(engine.stop)
        await engine.start()
    policy = await ranks.open(directory / "model", 0, guard.watch)
    http = await stack.enter_async_context(aiohttp.ClientSession())
    controls = [Timed(engine.url, http) for engine in engines]

    def all_first(most_bytes: int) -> Buckets:
        yield from list(policy.weight_buckets(most_bytes))

    sources = dict(zip(WAYS, (policy.weight_buckets, all_first, all_first), strict=True))
    way = WAYS[0]
    sender = WeightBroadcaster(lambda most_bytes: sources[way](most_bytes), print, options.bucket_mb * 2**20)
    stack.callback(sender.close)
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    version = 0
    for number in range(options.rounds + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            version += 1
            for one in controls:
                one.stages = "paused" not in way
            with memory_peak() as peak:
                began, cpu = time.perf_counter(), time.process_time()
                sent = await sender.send(controls, version)
                ended, cpu = time.perf_counter(), time.process_time() - cpu
            assert len(sent) == len(controls)
            gap = max(one.resumed_at - one.paused_at for one in controls)
            if number:  # the first round creates the process groups
                figures = {"publish_s": ended - began, "gap_s": gap, "held_mb": peak["mb"], "cpu_s": cpu}
                taken[way].append(figures)
    return size, taken


async def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as place:
        async with contextlib.AsyncExitStack() as stack:
            size, taken = await measured(options, Path(place), stack)
        more, more_checks = await differences.measure(
            Path(place) / "model", Path(place), options.demo_steps, options.rounds
        )
    names = ("publish_s", "gap_s", "held_mb", "cpu_s")
    medians = {
        way: {name: statistics.median(one[name] for one in rows) for name in names}
        for way, rows in taken.items()
    }
    model_mb = size / 2**20
    results = [{"way": way, "model_mb": model_mb, **found} for way, found in medians.items()]
    ahead, first, paused = (medians[way] for way in WAYS)
    checks = [
        Check("publish_s, one ahead ÷ all first", ahead["publish_s"] / first["publish_s"], "<=", 1.05),
        Check("gap_s, one ahead ÷ paused", ahead["gap_s"] / paused["gap_s"], "<=", 0.8),
    ]
    return report(results + more, checks + more_checks, as_json=options.json)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--bucket-mb", type=int, default=32)
    parser.add_argument("--demo-steps", type=int, default=6)
    parser.add_argument("--engines", type=int, default=1)
    torch.set_num_threads(1)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
