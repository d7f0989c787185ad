"""Measures decode, the optimiser step, a publish and a demo run on one GPU.

    python benchmarks/gpu.py [--json] [--shape qwen3-0.6b|tiny] [--device cuda] [--keep DIR]

The model has random weights and, by default, the shape of Qwen3-0.6B; engine and step compute in bfloat16.
All limits are measured on the same device in the same run.

- *Decode*: requests of 128 tokens in and 128 out, decoded simultaneously, temperature 1. `engine` is the
  embedded engine's scheduler; `generate` is transformers' `generate` on one batch, without its prefill time.
  `limit` is the number of rows ÷ the time to read the weights and the rows' keys and values once, at the
  bandwidth of a large copy. `waits_per_step` counts the synchronisations of host and device.
- *Step*: `Policy.update` on rows of equal length without shared prefixes; FLOPs as in `step.py`, compared
  with the peak of a large bfloat16 matmul.
- *Publish*: the policy's weight files are loaded into an engine that decodes 16 requests: pause, read, check,
  copy, resume. `until_next_token` also includes the recomputation of keys and values. Compared with reading
  the same bytes into page-locked memory and copying them to the device.
- *Demo*: `examples/demo` with engine and trainer on the device.

Without CUDA the script prints a message, measures nothing and exits with 0. `--shape tiny --device cpu` runs
every part in under a minute to test the script; its figures are meaningless, and nothing is checked.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import controls
import numpy as np
import torch
from common import Check, parser_of, place, report
from step import Work, flops
from transformers import Qwen3Config, Qwen3ForCausalLM

from tidegate.config import TrainerSettings, load_settings
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.engine.scheduling.scheduler import Scheduler
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.policy import Policy

Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """Shape of a model and size of its workload."""

    model: dict[str, int]
    counts: tuple[int, ...] = (1, 16, 64, 256)
    tokens: int = 128
    rows: int = 64
    row_tokens: int = 1024
    copied_mb: int = 2048
    matmul: int = 8192
    repeats: int = 5
    demo: tuple[str, ...] = ()
    checked: bool = True


SHAPES = {
    "qwen3-0.6b": Shape(
        {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "tiny": Shape(
        {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        counts=(1, 4), tokens=8, rows=4, row_tokens=64, copied_mb=8, matmul=128, repeats=2, checked=False,
        demo=("--trainer.steps=1", "--trainer.groups_per_batch=2",
              "--eval.tasks=4", "--eval.interim_tasks=4"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """The measured device and its limits."""

    device: torch.device
    bytes_s: float
    """Bytes read plus bytes written per second of a copy."""
    flops_s: float

    @classmethod
    def measured(cls, device: torch.device, shape: Shape) -> Device:
        source = torch.ones(shape.copied_mb * 2**20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copying = best(device, lambda: target.copy_(source), 10)
        left, right = (
            torch.randn(shape.matmul, shape.matmul, device=device, dtype=torch.bfloat16) for _ in "lr"
        )
        multiplying = best(device, lambda: left @ right, 10)
        return cls(device, 2 * source.nbytes / copying, 2 * shape.matmul**3 / multiplying)

    def row(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return {"device": name, "copy_bytes_s": self.bytes_s, "matmul_bf16_flops_s": self.flops_s}


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds until the device has finished `run`."""
    settle(device)
    began = time.perf_counter()
    run()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best(device: torch.device, run: Callable[[], object], repeats: int) -> float:
    run()
    return min(timed(device, run) for _ in range(repeats))


def make_model(directory: Path, shape: Shape) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape.model, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)


# -- decode


class Decoding:
    """Requests that decode simultaneously, on a scheduler without its thread."""

    def __init__(self, model: Model, count: int, tokens: int) -> None:
        self.scheduler = Scheduler(model, max_slots=count, version="0", deliver=lambda _: None)
        self.tokens = tokens
        limits = TokenLimits(model.vocab_size, model.max_context, frozenset(), False)
        rng = np.random.default_rng(0)
        self.requests: list[Generation] = []
        for seed in range(count):
            ids = rng.integers(0, model.vocab_size, tokens).tolist()
            params = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed}
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
            self.requests.append(parse_generate(body, limits))
            self.scheduler.submit(self.requests[-1])
        self.until(lambda: self.scheduler.num_waiting == 0 and self.scheduler.num_running == count)

    def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.scheduler.run_once()

    def steps(self, number: int) -> None:
        """Samples this many tokens for every row."""
        for _ in range(number):
            self.scheduler.run_once()

    def finish(self) -> float:
        """Tokens per second from now until the requests end."""
        left = sum(self.tokens - len(one.output_ids) for one in self.requests)
        began = time.perf_counter()
        self.until(lambda: self.scheduler.num_running == 0)  # the host has read the last token
        return left / (time.perf_counter() - began)


@contextlib.contextmanager
def warned_waits() -> Iterator[list[Any]]:
    """Collects torch's warnings about synchronisations of host and device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits_per_step(model: Model, count: int, tokens: int) -> float:
    decoding = Decoding(model, count, tokens)
    decoding.steps(2)
    number = tokens // 2
    with warned_waits() as seen:
        decoding.steps(number)
    decoding.finish()
    return sum("synchroniz" in str(one.message) for one in seen) / number


@torch.inference_mode()
def generate(model: Model, count: int, tokens: int) -> float:
    """Tokens per second of transformers' `generate` on one batch, without its prefill."""
    ids = torch.randint(0, model.vocab_size, (count, tokens), device=model.device)

    def run(new: int) -> object:
        return model.hf_model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
        )  # fmt: skip

    # The shortest of several: the difference of two single times is below 0 if another process delays one.
    more = best(model.device, lambda: run(tokens + 1), 5) - best(model.device, lambda: run(1), 5)
    return count * tokens / more


def limit(model: Model, count: int, tokens: int, bound: Device) -> float:
    """Tokens per second if memory bandwidth were the only limit."""
    config = model.hf_model.config
    weights = sum(one.nbytes for one in model.hf_model.parameters())
    width = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    cached = 2 * width * model.dtype.itemsize * 1.5 * tokens  # mean length of a row
    return count * bound.bytes_s / (weights + count * cached)


def decode(path: Path, shape: Shape, bound: Device) -> Results:
    options = EngineOptions(
        path, str(bound.device), "bfloat16", max_slots=max(shape.counts), max_context=4 * shape.tokens
    )
    engine = load_model(options)
    found = []
    for count in shape.counts:
        rates: dict[str, list[float]] = {"engine": [], "generate": []}
        for index in range(shape.repeats + 1):  # the first run is a warm-up
            each = {
                "engine": Decoding(engine, count, shape.tokens).finish(),
                "generate": generate(engine, count, shape.tokens),
            }
            for name, rate in each.items() if index else ():
                rates[name].append(rate)
        row: dict[str, Any] = {"what": f"decode, {count}"}
        row |= {f"{name}_tokens_s": median(taken) for name, taken in rates.items()}
        row["limit_tokens_s"] = limit(engine, count, shape.tokens, bound)
        row["of_limit"] = row["engine_tokens_s"] / row["limit_tokens_s"]
        row["vs_generate"] = median(a / b for a, b in zip(rates["engine"], rates["generate"], strict=True))
        if bound.device.type == "cuda":
            row["waits_per_step"] = waits_per_step(engine, count, shape.tokens)
        found.append(row)
    return found


# -- the optimiser step


def rows_of_one_length(shape: Shape) -> list[TrainingSequence]:
    """Random rows without shared prefixes; the last three quarters of each row are trained."""
    rng = np.random.default_rng(0)
    n = shape.row_tokens
    vocab = shape.model["vocab_size"]
    return [
        TrainingSequence(
            ids=rng.integers(0, vocab, n).astype(np.int32),
            mask=np.arange(n) >= n // 4,
            logprobs=np.full(n, -np.log(vocab), np.float32),
            versions=np.zeros(n, np.int64),
            temperature=np.ones(n, np.float32),
            advantages=np.full(n, (-1.0) ** index, np.float32),
            group_id=str(index // 8),
        )
        for index in range(shape.rows)
    ]


def step(policy: Policy, shape: Shape, bound: Device) -> dict[str, Any]:
    rows = rows_of_one_length(shape)

    def update() -> None:
        policy.update(rows, version=0)

    update()
    seconds = median(timed(bound.device, update) for _ in range(shape.repeats))
    work = flops(policy.model, (Work(0, row.inputs, row.trained) for row in rows))
    return {
        "what": f"step, {shape.rows} rows of {shape.row_tokens}",
        "seconds": seconds,
        "tokens_s": sum(row.inputs for row in rows) / seconds,
        "flops_utilisation": work / seconds / bound.flops_s,
    }


# -- publish


def read_and_copy(files: Sequence[Path], device: torch.device) -> float:
    """Seconds to read files into page-locked memory and copy them to the device."""
    buffers = [torch.empty(one.stat().st_size, dtype=torch.uint8) for one in files]
    if device.type == "cuda":
        buffers = [one.pin_memory() for one in buffers]
    targets = [torch.empty_like(one, device=device) for one in buffers]

    def run() -> None:
        for path, buffer, target in zip(files, buffers, targets, strict=True):
            with path.open("rb") as file:
                assert file.readinto(buffer.numpy()) == len(buffer)
            target.copy_(buffer)

    return best(device, run, 3)


def publish(policy: Policy, path: Path, directory: Path, shape: Shape, bound: Device) -> dict[str, Any]:
    weights = policy.save_weights(directory)
    files = sorted(weights.glob("*.safetensors"))
    options = EngineOptions(path, str(bound.device), "bfloat16", max_slots=16, max_context=4 * shape.tokens)
    model = load_model(options)
    gaps, nexts = [], []
    for version in range(1, shape.repeats + 1):
        decoding = Decoding(model, options.max_slots, shape.tokens)
        decoding.steps(shape.tokens // 2)
        scheduler = decoding.scheduler
        sampled = scheduler.counters.tokens_sampled

        def gap(scheduler: Scheduler = scheduler, version: int = version) -> None:
            scheduler.pause("retract")
            scheduler.load(model.read_weights(weights), str(version), keep_cache=False, abort_all=False)
            scheduler.resume()

        gaps.append(timed(bound.device, gap))
        began = time.perf_counter()
        decoding.until(lambda: scheduler.counters.tokens_sampled > sampled)  # noqa: B023 - called at once
        nexts.append(gaps[-1] + time.perf_counter() - began)
        decoding.finish()
    fastest = read_and_copy(files, bound.device)
    return {
        "what": "publish",
        "bytes": sum(one.stat().st_size for one in files),
        "gap_s": median(gaps),
        "until_next_token_s": median(nexts),
        "read_and_copy_s": fastest,
        "gap_vs_bandwidth": median(gaps) / fastest,
    }


# -- the demo


def demo(shape: Shape, device: torch.device, directory: Path) -> dict[str, Any]:
    with controls.demo("calculator", directory) as (config, laid):
        place = [f"--run.dir={directory}", "--run.name=demo"]
        on = [f"--engine.device={device}", f"--trainer.device={device}"]
        found = controls.train(load_settings(config, [*place, *laid, *on, *shape.demo]))
    return {"what": "demo", **found}


# -- main


def measure(shape: Shape, device: torch.device, directory: Path) -> tuple[Results, list[Check]]:
    path = directory / "model"
    make_model(path, shape)
    bound = Device.measured(device, shape)
    decoded = decode(path, shape, bound)
    policy = Policy.load(path, TrainerSettings(device=str(device), compute_dtype="bfloat16"))
    stepped = step(policy, shape, bound)
    published = publish(policy, path, directory / "published", shape, bound)
    results = [bound.row(), *decoded, stepped, published]
    checks = [
        Check("flops_utilisation", stepped["flops_utilisation"], ">=", 0.45),
        Check("publish_gap_vs_bandwidth", published["gap_vs_bandwidth"], "<=", 2.0),
        Check("waits_per_step", max(row.get("waits_per_step", 0.0) for row in decoded), "<=", 1.0),
    ]
    return results, checks if shape.checked else []


def learned(shape: Shape, device: torch.device, directory: Path) -> tuple[dict[str, Any], list[Check]]:
    ran = demo(shape, device, directory)
    checks = [
        Check("demo_after", ran["after"], ">=", 0.90),
        Check("demo_logprob_max_error", ran["logprob_max_error"], "<=", 1e-3),
        Check("demo_audit_holds", float(ran["audit"]), "==", 1.0),
    ]
    return ran, checks if shape.checked else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--keep", type=Path, help="directory in which to keep the demo's run")
    given = parser.parse_args(arguments)
    if given.device.type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here: nothing was measured, and nothing is claimed.")
        return report([], [], as_json=given.json)
    shape = SHAPES[given.shape]
    with place(None, "gpu") as directory:
        results, checks = measure(shape, given.device, directory)
        ran, more = learned(shape, given.device, given.keep or directory)
    return report([*results, ran], [*checks, *more], as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
