"""Published versions as differences: bytes and times beside all weights, a damaged one, and sixteen engines.

Used by benchmarks/broadcast.py. The demo's updates are those of a run of `examples/demo` that writes a
checkpoint at each step. The RL-size updates are steps of AdamW with a learning rate of 1e-6 and random
gradients, on a random Qwen3.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from common import Check
from transformers import AutoModelForCausalLM

from tidegate.engine.weights.loading import copy_weights, read_weights
from tidegate.trainer.checkpoint.huggingface import cast
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.weights import checksum, delta_files
from tidegate.weights.files import WeightsError

LEARNING_RATE = 1e-6
DEMO = Path(__file__).parents[1] / "examples" / "demo" / "config.toml"
FULL, DIFFERENCE = "all weights", "difference"
ENGINES = 16


def demo_checkpoints(directory: Path, steps: int) -> list[Path]:
    """Run the demo for some steps; return its model after each."""
    subprocess.run(
        [
            sys.executable, "-m", "tidegate", "train", str(DEMO), "--fresh", f"--run.dir={directory}",
            f"--trainer.steps={steps}", "--trainer.checkpoint_every=1", "--trainer.keep_checkpoints=1000",
            "--eval.tasks=4", "--eval.interim_tasks=4", "--eval.every=0", "--trainer.schedule=constant",
        ],
        check=True, cwd=DEMO.parents[2], stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return sorted(directory.glob("*/checkpoints/step_*"))


@dataclass
class Versions:
    """A model whose values change with every version."""

    model: Any
    change: Callable[[int], bool]
    """Changes the model for the version with this number; returns False after the last."""

    def save(self, place: Path, dtype: str) -> None:
        self.model.save_pretrained(place, state_dict=cast(self.model.state_dict(), dtype))
        checksum.write(place)

    def buckets(self, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        for name, value in self.model.named_parameters():
            yield {name: value.detach()}


def of_demo(places: list[Path]) -> Versions:
    model = AutoModelForCausalLM.from_pretrained(places[0], dtype=torch.float32)

    def change(number: int) -> bool:
        if number >= len(places):
            return False
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(places[number]).state_dict())
        return True

    return Versions(model, change)


def of_rl_size(base: Path, number_of_versions: int) -> Versions:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def change(number: int) -> bool:
        for value in model.parameters():
            value.grad = torch.randn_like(value)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return number < number_of_versions

    return Versions(model, change)


def compare(name: str, versions: Versions, dtype: str, directory: Path) -> dict[str, Any]:
    """Publish each version in both ways and load it on an engine; return medians."""
    writers = {
        way: VersionWriter(
            directory / way, versions.save, versions.buckets, dtype, 1 if way == FULL else 10**6
        )
        for way in (FULL, DIFFERENCE)
    }
    kind = getattr(torch, dtype)
    engines = {}
    for way, writer in writers.items():
        place = writer.write(0)
        engines[way] = AutoModelForCausalLM.from_pretrained(place, dtype=kind)
    rows: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in writers}
    number = 0
    while versions.change(number := number + 1):
        for way in (FULL, DIFFERENCE) if number % 2 else (DIFFERENCE, FULL):
            writer = writers[way]
            writer._pause = 0  # measured here whether or not it pays
            began, cpu = time.perf_counter(), time.process_time()
            place = writer.write(number)
            written, cpu = time.perf_counter(), time.process_time() - cpu
            copy_weights(read_weights(engines[way], place))
            size = sum(file.stat().st_size for file in place.iterdir())
            rows[way].append((size, written - began, time.perf_counter() - written, cpu))
    same = all(
        torch.equal(one, other)
        for one, other in zip(*(engine.state_dict().values() for engine in engines.values()), strict=True)
    )
    full, difference = (
        [statistics.median(row[column] for row in rows[way]) for column in range(4)]
        for way in (FULL, DIFFERENCE)
    )
    return {
        "updates": name, "dtype": dtype, "full_mb": full[0] / 1e6, "difference_mb": difference[0] / 1e6,
        "bytes": difference[0] / full[0], "full_s": sum(full[1:3]), "difference_s": sum(difference[1:3]),
        "time": sum(difference[1:3]) / sum(full[1:3]), "identical": same,
        "full_write_cpu_s": full[3], "difference_write_cpu_s": difference[3],
        "is_difference": delta_files.is_delta(place),
    }  # fmt: skip


def damaged(versions: Versions, directory: Path) -> tuple[int, int, int]:
    """Damage a difference, and remove one; return refusals, changed engines and loads of all weights."""
    writer = VersionWriter(directory, versions.save, versions.buckets, "bfloat16", 10**6)
    engine = AutoModelForCausalLM.from_pretrained(writer.write(0), dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    refused = loaded = 0
    for number, fault in enumerate(("flipped bit", "missing"), 1):
        versions.change(number)
        writer._pause = 0
        place = writer.write(number)
        file = place / delta_files.FILE
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data) if fault == "flipped bit" else file.unlink()
        try:
            copy_weights(read_weights(engine, place))
        except WeightsError as error:
            refused += 1
            changed = sum(not torch.equal(before[name], value) for name, value in engine.state_dict().items())
            writer.on_refused(str(error))
        copy_weights(read_weights(engine, writer.write_full(number)))
        parameters = dict(versions.model.named_parameters())
        loaded += all(
            torch.equal(value, parameters[name].to(torch.bfloat16))
            for name, value in engine.named_parameters()
        )
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        writer.full_every = 10**6
    return refused, changed, loaded


def serve_stand_ins(ports: int) -> None:
    """Serve engines that take everything and hold nothing; print their ports."""

    async def run() -> None:
        for _ in range(ports):
            app = web.Application(client_max_size=2**31)
            version = {"weight_version": "0"}

            async def take(request: web.Request, version: dict[str, str] = version) -> web.Response:
                if request.method == "POST":
                    async for _ in request.content.iter_any():
                        pass
                    version["weight_version"] = request.query.get("weight_version", version["weight_version"])
                return web.json_response(version)

            app.router.add_route("*", "/{path:.*}", take)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            print(runner.addresses[0][1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    asyncio.run(run())


async def fan_out(versions: Versions, directory: Path, rounds: int) -> dict[str, float]:
    """Publish to one stand-in and to sixteen by turns; return the sender's medians."""
    command = [sys.executable, __file__, str(ENGINES)]
    with subprocess.Popen(  # noqa: ASYNC220 - once
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ports = [int(process.stdout.readline()) for _ in range(ENGINES)]
            writer = VersionWriter(directory, versions.save, versions.buckets, "bfloat16", 10**6)
            writer.write(0)
            taken: dict[int, list[tuple[float, float]]] = {1: [], ENGINES: []}
            number = 0
            async with aiohttp.ClientSession() as http:
                engines = [EngineControl(f"http://127.0.0.1:{port}", http) for port in ports]
                for turn in range(rounds):
                    for count in (1, ENGINES) if turn % 2 else (ENGINES, 1):
                        number += 1
                        versions.change(number)
                        writer._pause = 0
                        began, cpu = time.perf_counter(), time.process_time()
                        place = await asyncio.to_thread(writer.write, number)
                        data = await asyncio.to_thread((place / delta_files.FILE).read_bytes)
                        await asyncio.gather(*(one.send_difference(data, number) for one in engines[:count]))
                        taken[count].append((time.perf_counter() - began, time.process_time() - cpu))
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
    medians = {
        count: [statistics.median(row[column] for row in rows) for column in (0, 1)]
        for count, rows in taken.items()
    }
    one, many = medians[1], medians[ENGINES]
    return {
        "difference_mb": len(data) / 1e6,
        "one_s": one[0], "sixteen_s": many[0], "one_cpu_s": one[1], "sixteen_cpu_s": many[1],
        "wall": many[0] / one[0], "cpu": many[1] / one[1],
    }  # fmt: skip


async def measure(
    base: Path, directory: Path, demo_steps: int, rounds: int
) -> tuple[list[dict[str, Any]], list[Check]]:
    """Measure on the demo's updates and on those of the model in `base`."""
    places = await asyncio.to_thread(demo_checkpoints, directory / "demo", demo_steps)
    rows = [
        await asyncio.to_thread(compare, "demo", of_demo(places), dtype, directory / f"demo-{dtype}")
        for dtype in ("bfloat16", "float32")
    ]
    rows.append(
        await asyncio.to_thread(
            compare,
            f"learning rate {LEARNING_RATE:g}",
            of_rl_size(base, rounds + 1),
            "bfloat16",
            directory / "rl",
        )
    )
    refused, changed, loaded = await asyncio.to_thread(damaged, of_demo(places), directory / "damaged")
    fan = await fan_out(of_rl_size(base, 10**6), directory / "fan", rounds)
    demo, _, rl = rows
    checks = [
        Check("bytes, demo in bfloat16", demo["bytes"], "<=", 0.35),
        Check("bytes, RL size in bfloat16", rl["bytes"], "<=", 0.1),
        Check("time, RL size, difference ÷ all weights", rl["time"], "<=", 1.0),
        Check("versions identical", sum(row["identical"] for row in rows), "==", 3),
        Check("damaged and missing differences refused", refused, "==", 2),
        Check("tensors changed by a refused difference", changed, "==", 0),
        Check("all weights loaded after a refusal", loaded, "==", 2),
        Check("sender's wall time, 16 engines ÷ 1", fan["wall"], "<=", 3),
        Check("sender's CPU time, 16 engines ÷ 1", fan["cpu"], "<=", 3),
    ]
    return [*rows, {"engines": ENGINES, **fan}], checks


if __name__ == "__main__":
    serve_stand_ins(int(sys.argv[1]))
