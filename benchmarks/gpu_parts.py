"""The parts of `gpu.py`: each prints its figures as JSON objects.

The model has the shape of Qwen3-0.6B, random weights, and the tokenizer of `examples/tiny_base`, filled up to
the shape's vocabulary. Memory is the peak that torch allocated, in GB; `plan_gb` is the estimate of
`tidegate train --dry-run`. `mfu` are useful FLOPs, counted as in `step.py` with a shared prefix once, as a
share of the rate of a large matmul in the same process.

- `kernels`: rates of a large copy and a large matmul, then attention alone: time, memory and torch's kernel,
  causal (`causal`), and of the second half of rows that share the first, as the trainer computes it on a GPU
  (`prefix`) and with a boolean mask (`prefix with a mask`), which it avoids.
- `steps`: `Policy.update`, the last half of each row trained, or the tokens after a shared prefix, also with
  sharing off. The last row has the operations of a step with the longest times.
- `ranks`: a step with FSDP on the only rank of an NCCL group, then all weights in bfloat16 over the trainer's
  side of a weights group. Without a receiver no bytes move: it takes the time of casts, checksums and calls.
- `publish`: weights written, and loaded into an engine that decodes 16 requests: pause, read, check, copy,
  resume (`gap_s`); `next_token_s` includes the recomputation of keys and values.
- `logprobs`: sampled by the engine and computed by the trainer.
- `compiled`: the first row of `steps` with `trainer.compile`.
- `decode`: all requests are admitted before decoding is timed. `limit` is the number of rows ÷ the time to
  read weights, keys and values once, at the rate of the copy.
- `predicted`: figures of `roofline.py` for the first row of `steps` (8 of its passes) and for a broadcast.
- `demo`: `examples/demo` with engine and trainer on the device; each step has a line. Its 80 steps are fewer
  if its time limit is short.
- `gsm8k`, `gsm8k_sglang`: steps of `examples/gsm8k` with the embedded engine and with SGLang; medians of the
  run's metrics without the first step's.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from step import computed, flops
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from tidegate.config import Settings, TrainerSettings, load_settings
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.engine.scheduling.scheduler import Scheduler
from tidegate.plan.memory import _trainer_plan
from tidegate.plan.shape import PUBLISHED, read_shape
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.distributed import fsdp, rank_main
from tidegate.trainer.policy.attention import attention
from tidegate.trainer.policy.forward import _mask
from tidegate.trainer.policy.policy import Policy
from tidegate.weights.process_group import JOIN_S, WeightsGroup

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHARED = ROOT / "shared" if (ROOT / "shared").exists() else ROOT.parent / "shared"
GSM8K = SHARED / "data" / "gsm8k"
DEMO_S = 240.0
"""The demo has all of its steps if its limit is this long."""
TINY = {
    **PUBLISHED["qwen3-0.6b"], "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def say(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


@dataclass(frozen=True)
class Case:
    """Rows of an optimiser step, in groups of 8 that share a prefix, and its settings."""

    name: str
    rows: int
    own: int
    prefix: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    sharing: bool = True

    def sequences(self, vocabulary: int) -> list[TrainingSequence]:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, vocabulary, (1 + self.rows // 8, self.prefix))
        n = self.prefix + self.own
        return [
            TrainingSequence(
                ids=np.append(prompts[index // 8], rng.integers(0, vocabulary, self.own)).astype(np.int32),
                mask=np.arange(n) >= (self.prefix or n // 2),
                logprobs=np.full(n, -np.log(vocabulary), np.float32),
                versions=np.zeros(n, np.int64),
                temperature=np.ones(n, np.float32),
                advantages=np.full(n, (-1.0) ** index, np.float32),
                group_id=str(index // 8),
            )
            for index in range(self.rows)
        ]


@dataclass(frozen=True)
class Place:
    """Where and at which size a part measures."""

    directory: Path
    device: torch.device
    tiny: bool
    sglang: str
    limit_s: float

    def sized(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full

    @cached_property
    def model(self) -> Path:
        """The model's directory; the first part that needs it makes it."""
        path = self.directory / "model"
        if not path.exists():
            torch.manual_seed(0)
            config = AutoConfig.for_model(
                **self.shape, max_position_embeddings=40960, initializer_range=0.05,
                bos_token_id=None, eos_token_id=None, pad_token_id=None,
            )  # fmt: skip
            unfinished = path.with_name("model.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            with self.device:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.save_pretrained(unfinished)
            source = EXAMPLES / "tiny_base" / "model"
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(source / name, unfinished)
            tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
            used = 1 + max(token["id"] for token in tokenizer["added_tokens"])
            tokenizer["model"]["vocab"] |= {f"<{n}>": n for n in range(used, config.vocab_size)}
            (unfinished / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
            unfinished.rename(path)
        return path

    @property
    def shape(self) -> dict[str, Any]:
        return dict(self.sized(PUBLISHED["qwen3-0.6b"], TINY))

    @cached_property
    def copy_bytes_s(self) -> float:
        """Bytes read and bytes written per second of a large copy."""
        source = torch.ones(self.sized(2**31, 2**23), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.best(lambda: target.copy_(source), 10)

    @cached_property
    def matmul_flops_s(self) -> float:
        size = self.sized(8192, 128)
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in "lr")
        return 2 * size**3 / self.best(lambda: left @ right, 10)

    def timed(self, run: Callable[[], object]) -> float:
        """Seconds until the device has finished."""
        self.settle()
        began = time.perf_counter()
        run()
        self.settle()
        return time.perf_counter() - began

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def best(self, run: Callable[[], object], repeats: int) -> float:
        run()
        return min(self.timed(run) for _ in range(repeats))

    def forget_peak(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak_gb(self) -> float | None:
        return torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else None

    def settings(self, **changed: Any) -> TrainerSettings:
        defaults = {"device": str(self.device), "compute_dtype": "bfloat16", "microbatch_tokens": 8192}
        return TrainerSettings(**{**defaults, **changed})

    def engine(self, dtype: str, slots: int, context: int) -> Model:
        return load_model(EngineOptions(self.model, str(self.device), dtype, 1, slots, context))

    def cases(self) -> list[Case]:
        recomputed = {"microbatch_tokens": self.sized(32768, 256), "activation_checkpointing": True}
        float32 = {"compute_dtype": "float32"}
        rows, n, long, prefix, own = self.sized((64, 1024, 32768, 2048, 256), (8, 32, 256, 64, 16))
        return [
            Case(f"{rows} x {n}", rows, n),
            Case(f"8 x {n}, float32", 8, n, settings=float32),
            Case(f"1 x {long}, activation_checkpointing", 1, long, settings=recomputed),
            Case(f"{rows // 2} x ({prefix} + {own}), prefixes shared", rows // 2, own, prefix),
            Case(f"{rows // 2} x ({prefix} + {own}), not shared", rows // 2, own, prefix, sharing=False),
        ]


# -- the trainer


def kernels(place: Place) -> None:
    cuda = place.device.type == "cuda"
    say(
        "device",
        name=torch.cuda.get_device_name(place.device) if cuda else "CPU",
        torch=torch.__version__,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        copy_bytes_s=place.copy_bytes_s,
        matmul_flops_s=place.matmul_flops_s,
    )
    lengths = place.sized((1024, 4096, 16384), (32, 64))
    forms = ("causal", "prefix", "prefix with a mask")
    for length, dtype, form in itertools.product(lengths, ("bfloat16", "float32"), forms):
        place.forget_peak()
        try:
            figures = attended(place, length, getattr(torch, dtype), form)
        except torch.OutOfMemoryError as error:
            figures = {"error": str(error).splitlines()[0]}
        say(f"attention, {form}, {dtype}, {length}", **figures)


def attended(place: Place, length: int, dtype: torch.dtype, form: str) -> dict[str, Any]:
    heads, kv_heads, width = (
        place.shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    queries = length if form == "causal" else length // 2
    query, key, value = (
        torch.randn(1, number, tokens, width, device=place.device, dtype=dtype, requires_grad=True)
        for number, tokens in ((heads, queries), (kv_heads, length), (kv_heads, length))
    )
    seen = torch.tensor([length - queries]).to(place.device)
    batch: Any = SimpleNamespace(
        ids_bt=query.new_empty(1, queries), prefix_width=length - queries, starts_b=seen
    )
    mask = _mask(batch) if form == "prefix with a mask" else None
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)

    def forward() -> torch.Tensor:
        return attention(module, query, key, value, mask)[0]

    node: Any = forward().grad_fn
    while node is not None and "Attention" not in node.name():
        node = node.next_functions[0][0] if node.next_functions else None
    kernel = "math" if node is None else node.name()
    del node  # it holds the tensors of its graph
    place.forget_peak()
    forward_s = place.best(forward, 3)
    both_s = place.best(lambda: forward().sum().backward(), 3)
    work = 2 * heads * width * (length**2 - (length - queries) ** 2)  # 4 a pair; half of the pairs count
    return {
        "kernel": kernel,
        "forward_ms": 1e3 * forward_s,
        "backward_ms": 1e3 * (both_s - forward_s),
        "forward_flops_s": work / forward_s,
        "peak_gb": place.peak_gb,
    }


def stepped(place: Place, case: Case, policy: Policy) -> dict[str, Any]:
    """Figures of the policy's steps on a case."""
    rows = case.sequences(place.shape["vocab_size"])
    policy._forward.shares &= case.sharing
    metrics: dict[str, float] = {}

    def update() -> None:
        metrics.update(policy.update(rows, version=0))

    place.forget_peak()
    first = place.timed(update)
    seconds = median(place.timed(update) for _ in range(place.sized(2, 1)))
    forward, limit = policy._forward, policy.settings.microbatch_tokens
    batches = prefix_batches(rows, limit, share=forward.shares, one_length=forward._one_length)
    useful, tokens = flops(policy.model, computed(rows, batches)), sum(row.inputs for row in rows)
    plan = _trainer_plan(policy.settings, read_shape(place.model))
    return {
        "seconds": seconds,
        "first_s": first,
        "tokens_s": tokens / seconds,
        "tokens": tokens,
        "computed": metrics["tokens/computed"],
        "peak_gb": place.peak_gb,
        "plan_gb": sum(item.size for item in plan) / 1e9,
        "mfu": useful / seconds / place.matmul_flops_s,
    }


def steps(place: Place) -> None:
    for case in place.cases():
        try:
            figures = stepped(place, case, Policy.load(place.model, place.settings(**case.settings)))
        except Exception as error:  # noqa: BLE001 - the other cases are measured
            figures = {"error": repr(error)}
        say(case.name, **figures)
    policy = Policy.load(place.model, place.settings())
    rows = place.cases()[0].sequences(place.shape["vocab_size"])[:8]
    policy.update(rows, version=0)
    cuda = place.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as seen:
        seconds = place.timed(lambda: policy.update(rows, version=0))

    def milliseconds(event: Any) -> float:
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3

    longest = sorted(seen.key_averages(), key=milliseconds, reverse=True)[:20]
    say(
        f"profile of {len(rows)} rows",
        seconds=seconds,
        ms={event.key[:80]: [round(milliseconds(event), 2), event.count] for event in longest},
    )


def compiled(place: Place) -> None:
    case = place.cases()[0]
    policy = Policy.load(place.model, place.settings(compile=True))
    say(f"{case.name}, compiled", **stepped(place, case, policy))


class OneRank(fsdp.FSDPRanks):
    """The only rank of a group, which takes the branches of several ranks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.count = 2

    def shard_model(self, *arguments: Any) -> Any:
        self.count = 1
        return super().shard_model(*arguments)


def ranks(place: Place) -> None:
    # Parts need no package for HTTP, except where they are imported in functions.
    from tidegate.trainer.publish.broadcast import DEVICE_BUCKET_BYTES, Bucket

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    init = rank_main.RankInit(place.settings(), place.model, 0, ("127.0.0.1", store.port), 60.0)
    with mock.patch.object(rank_main, "FSDPRanks", OneRank):
        policy = init.join(0, store)
    case = place.cases()[0]
    say(f"{case.name}, FSDP", backend=dist.get_backend_config(), **stepped(place, case, policy))
    group = WeightsGroup(store, 0, 1, "weights", JOIN_S, "127.0.0.1", policy.device)
    sizes: list[int] = []

    def send() -> None:
        sizes.clear()
        on_device = place.device.type == "cuda"
        for bucket in policy.weight_buckets(DEVICE_BUCKET_BYTES, as_files="bfloat16", on_device=on_device):
            sent = Bucket.of(bucket)
            group.broadcast([sent.data])
            sizes.append(sent.size)

    seconds = place.best(send, 3)
    say(
        "weights group",
        seconds=seconds,
        bytes=sum(sizes),
        buckets=len(sizes),
        note="1 rank: no bytes move between GPUs, so the seconds say nothing about bandwidth",
    )
    group.close()
    dist.destroy_process_group()


# -- the engine


def admitted(model: Model, count: int, tokens: int) -> tuple[Scheduler, list[Generation]]:
    """A scheduler without its thread whose requests, `tokens` in and out, have rows or have ended."""
    scheduler = Scheduler(model, max_slots=model.max_slots, version="0", deliver=lambda _: None)
    limits = TokenLimits(model.vocab_size, model.max_context, frozenset(), False)
    rng = np.random.default_rng(count)
    requests = []
    for seed in range(count):
        params = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed}
        ids = rng.integers(0, model.vocab_size, tokens).tolist()
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        requests.append(parse_generate(body, limits))
        scheduler.submit(requests[-1])
    scheduler.run_once()
    while scheduler.num_waiting:
        scheduler.run_once()
    return scheduler, requests


def finish(scheduler: Scheduler) -> None:
    while scheduler.num_running:
        scheduler.run_once()


def publish(place: Place) -> None:
    policy = Policy.load(place.model, place.settings())
    target = place.directory / "published"
    written = place.timed(lambda: policy.save_weights(target, dtype="bfloat16"))
    tokens = place.sized(128, 16)
    model = place.engine("bfloat16", 16, 4 * tokens)
    gaps, nexts = [], []
    for version in range(1, place.sized(4, 3)):
        scheduler, _ = admitted(model, 16, tokens)
        scheduler.run_once()
        sampled = scheduler.counters.tokens_sampled
        began = time.perf_counter()
        scheduler.pause("retract")
        scheduler.load(model.read_weights(target), str(version), keep_cache=False, abort_all=False)
        scheduler.resume()
        place.settle()
        gaps.append(time.perf_counter() - began)
        while scheduler.counters.tokens_sampled == sampled:
            scheduler.run_once()
        nexts.append(time.perf_counter() - began)
        finish(scheduler)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    say("publish by files", bytes=size, written_s=written, gap_s=median(gaps), next_token_s=median(nexts))


def logprobs(place: Place) -> None:
    tokens = place.sized(128, 16)
    for dtype in ("bfloat16", "float32"):
        scheduler, requests = admitted(place.engine(dtype, 16, 4 * tokens), 16, tokens)
        finish(scheduler)
        case = Case("sampled", len(requests), tokens, prefix=tokens)
        rows = case.sequences(place.shape["vocab_size"])
        for row, request in zip(rows, requests, strict=True):
            row.ids = np.array(request.prompt_ids + request.output_ids, np.int32)
            row.logprobs[row.mask] = request.logprobs
        policy = Policy.load(place.model, place.settings(compute_dtype=dtype))
        computed = policy.logprobs(rows)
        errors = np.abs(np.concatenate([a - b.logprobs for a, b in zip(computed, rows, strict=True)]))
        metrics = policy.update(rows, version=0)
        names = ("mismatch_kl", "logprob_max_error", "entropy")
        figures = {name: metrics[name] for name in names}
        trained = errors[np.concatenate([row.mask for row in rows])]
        say(f"engine and trainer, {dtype}", mean_error=float(fmean(trained)), **figures)


def decode(place: Place) -> None:
    counts = place.sized((64, 256, 1, 16), (4, 1))
    tokens = place.sized(64, 8)
    model = place.engine("bfloat16", max(counts), 4 * tokens)
    config = model.hf_model.config
    weights = sum(one.nbytes for one in model.hf_model.parameters())
    width = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for count in counts:
        rates = []
        for _ in range(1 + place.sized(2, 1)):  # the first run is a warm-up
            scheduler, _ = admitted(model, count, tokens)
            sampled = scheduler.counters.tokens_sampled
            seconds = place.timed(lambda scheduler=scheduler: finish(scheduler))
            rates.append((scheduler.counters.tokens_sampled - sampled) / seconds)
        cached = count * 2 * model.dtype.itemsize * width * 1.5 * tokens  # mean length of a row
        limit = count * place.copy_bytes_s / (weights + cached)
        rate = median(rates[1:])
        say(f"decode, {count}", tokens_s=rate, limit_tokens_s=limit, of_limit=rate / limit)


# -- predictions and runs


def predicted(place: Place) -> None:
    import roofline

    name = "qwen3-0.6b"
    for row in roofline.predicted(name, 1, roofline.recorded_alone(name, 1)):
        say("roofline", **row)


def trained(settings: Settings) -> dict[str, Any]:
    """Trains a run; returns its held-out rewards before and after, and whether its books are consistent."""
    from tidegate.envs.base import load_environment
    from tidegate.observer import ForwardingObserver
    from tidegate.trainer.ledger.audit import audit_run
    from tidegate.trainer.records.metrics import read_metrics
    from tidegate.trainer.run import Run

    shown = ("step", "reward/mean", "eval/reward", "time/step", "time/update", "logprob_max_error")

    class Progress(ForwardingObserver):
        """Prints some metrics of each step and evaluation at once: the run may be killed at its limit."""

        def forward(self, method: str, *arguments: Any) -> None:
            if method == "step":
                (metrics,) = arguments
                say("progress", **{name: metrics[name] for name in shown if metrics.get(name) is not None})

    began = time.monotonic()
    environment = load_environment(settings.env.use, settings.env.options)
    result = asyncio.run(Run(settings, environment, Progress()).train())
    errors = [line["logprob_max_error"] for line in read_metrics(settings.run_dir)[1:]]
    return {
        "before": result.initial_eval["eval/reward"],
        "after": result.final_eval["eval/reward"],
        "logprob_max_error": max(filter(None, errors), default=None),
        "audit": audit_run(settings.run_dir).consistent,
        "seconds": round(time.monotonic() - began, 1),
    }


def demo(place: Place) -> None:
    on = [f"--engine.device={place.device}", f"--trainer.device={place.device}"]
    less = ["--trainer.steps=1", "--trainer.groups_per_batch=2", "--eval.tasks=4", "--eval.interim_tasks=4"]
    some = ["--trainer.steps=20", "--eval.tasks=64"]
    full = [] if place.limit_s >= DEMO_S else some
    where = [f"--run.dir={place.directory}", "--run.name=demo"]
    config = EXAMPLES / "demo" / "config.toml"
    say("demo", **trained(load_settings(config, [*where, *on, *place.sized(full, less)])))


def gsm8k(place: Place, *engine: str) -> None:
    from tidegate.trainer.records.metrics import read_metrics

    kind = "sglang" if engine else "embedded"
    tiny = [
        "--trainer.groups_per_batch=2", "--trainer.group_size=2", "--trainer.steps=2", "--eval.tasks=2",
        "--sampling.max_tokens=8",
    ]  # fmt: skip
    full = ["--trainer.steps=8", "--eval.tasks=16"]
    overrides = [
        f"--run.dir={place.directory}", f"--run.name=gsm8k-{kind}", f"--model.path={place.model}",
        f"--env.options.path={GSM8K}", f"--engine.device={place.device}", f"--trainer.device={place.device}",
        "--engine.max_context=4096", "--trainer.dynamic_sampling=false", "--eval.every=0", *engine,
        *place.sized(full, tiny),
    ]  # fmt: skip
    settings = load_settings(EXAMPLES / "gsm8k" / "config-qwen3-0.6b.toml", overrides)
    say(f"gsm8k, {kind}", **trained(settings))
    lines = [line for line in read_metrics(settings.run_dir) if "time/step" in line][1:]
    shown = ("time/", "tokens/", "length/", "cache/", "mismatch_kl", "logprob_max_error", "staleness/mean")
    values = {
        name: [line[name] for line in lines if line.get(name) is not None]
        for name in lines[0]
        if name.startswith(shown)
    }
    medians = {name: median(known) for name, known in values.items() if known}
    say(f"medians of {len(lines)} steps", **medians)


def gsm8k_sglang(place: Place) -> None:
    arguments = json.dumps(["--mem-fraction-static", "0.35", "--context-length", "4096"])
    assert place.sglang, "--sglang must name the interpreter of SGLang's environment"
    gsm8k(place, "--engine.kind=sglang", f"--engine.python={place.sglang}", f"--engine.arguments={arguments}")


PARTS: dict[str, Callable[[Place], None]] = {
    part.__name__: part
    for part in (
        kernels, steps, ranks, publish, logprobs, compiled, decode, predicted, demo, gsm8k, gsm8k_sglang,
    )
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    part, directory, device, tiny, sglang, limit_s = arguments
    place = Place(Path(directory), torch.device(device), bool(int(tiny)), sglang, float(limit_s))
    if place.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device: nothing was measured")
    PARTS[part](place)


if __name__ == "__main__":
    main(sys.argv[1:])
