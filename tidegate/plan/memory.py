"""Estimates the memory and the disk of a run, without loading anything; `Shape` has the formulas of a model.

With P parameters of b bytes:

- weights: P · b. The trainer holds float32, the engine its `dtype`.
- gradients: 4 · P; AdamW's two moments: 8 · P, both float32. With LoRA of rank r these are of r · (in +
  out) parameters per linear layer instead of P, which are added to the weights. Activations are estimated
  as without LoRA, which is an upper bound.
- prefixes: keys and values of earlier sequences, kept up to the engine's bound.
- passes: a prefill pass of at most 4,096 tokens, and to sample for all slots, 28 B a logit (logits, divided,
  logprobs in float32; probabilities and their sums in float64).
- program: Python, PyTorch and transformers, in a process on the CPU.
- share: SGLang or vLLM on the trainer's GPU takes the share of its memory that `engine.arguments` name.
- checkpoint: host memory. Several ranks write one beside their steps: 4 · P for the weights and 8 · P for
  copies of the moments, in each replica. A single rank on a GPU reads as much when it resumes.

PyTorch needs about 0.5 GB per GPU in addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidegate.config import Settings, TrainerSettings
from tidegate.errors import ConfigError, StartError
from tidegate.plan.gpu_share import GpuShare, gpu_shares
from tidegate.plan.shape import BYTES, FLOAT32, Shape, read_shape
from tidegate.trainer.processes.gpus import engine_gpus, visible_gpus

PROGRAM = 500 * 10**6
"""Memory of an engine that has served SmolLM2-135M one request, without its weights; measured on Linux."""
TYPICAL_GPU = 80 * 10**9
"""Memory of the GPU for which a value is proposed, if that of this machine is unknown."""
PASS_TOKENS = 4096
"""Maximum padded tokens of a prefill pass, as in the engine."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the plan: `size` bytes on `device`, and their calculation (`how`)."""

    device: str
    owner: str
    what: str
    how: str
    size: int


def memory_plan(settings: Settings, shape: Shape) -> list[Item]:
    """Returns the memory of engine and trainer, in display order."""
    engine, trainer = settings.engine, settings.trainer
    number = shape.parameters
    counted = f"{number:,} parameters"
    items: list[Item] = []
    if not engine.urls and engine.kind == "embedded":
        size = BYTES[engine.weights_dtype]
        for device in _engine_devices(settings):
            items += [
                Item(device, "engine", "weights", f"{counted} × {size} B", number * size),
                Item(
                    device, "engine", "KV cache",
                    f"{engine.max_slots} slots × {engine.max_context} tokens × {shape.layers} layers × "
                    f"{shape.kv_heads} heads × {shape.head_dim} × 2 × {size} B",
                    shape.kv_bytes(engine.max_slots, engine.max_context, engine.weights_dtype),
                ),
                Item(
                    device, "engine", "prefixes", "maximum, for earlier sequences",
                    engine.prefix_cache_mb * 2**20,
                ),
                Item(
                    device, "engine", "passes",
                    f"estimate for {PASS_TOKENS:,} tokens, and {engine.max_slots} × {shape.vocab:,} logits",
                    shape.pass_bytes(PASS_TOKENS, engine.weights_dtype)
                    + 28 * engine.max_slots * shape.vocab,
                ),
                *_program(device, "engine"),
            ]  # fmt: skip
    if trainer.backend == "own":
        items += [*_trainer_plan(trainer, shape), *_checkpoint_plan(trainer, shape)]
    return items


def run_plan(settings: Settings, free: Callable[[str], int | None]) -> list[Item]:
    """Returns the memory of all policies of a run; raises ConfigError if a model's size is unknown.

    `free` returns the free memory of a device in bytes; None if unknown.
    """
    shares = [share for share in gpu_shares(settings) if share.value is not None]
    items = [_share(settings.trainer.device, share, free(settings.trainer.device)) for share in shares]
    if not settings.policies:
        return [*memory_plan(settings, read_shape(settings.model.path)), *items]
    for name, policy in settings.policies.items():
        own = settings.of_policy(name)
        for item in memory_plan(own, read_shape(own.model.path)):
            if policy.trained if item.owner == "trainer" else name in settings.engine_sets:
                items.append(replace(item, how=f"{name}: {item.how}"))
    return items


def _engine_devices(settings: Settings) -> list[str]:
    """Returns the device of each embedded engine; the trainer's GPU has the trainer's name."""
    engine, trainer = settings.engine, settings.trainer
    try:
        gpus = engine_gpus(settings, len(visible_gpus())).engines[""]
    except ConfigError:  # refused by name before the start
        gpus = [()] * engine.count
    names = [f"cuda:{own[0]}" if own else engine.device for own in gpus]
    return [trainer.device if (name, trainer.device) == ("cuda:0", "cuda") else name for name in names]


def _share(device: str, share: GpuShare, available: int | None) -> Item:
    size = int(share.engines * (share.value or 0) * (available or 0))
    memory = "the GPU's memory, which is unknown" if available is None else readable(available)
    return Item(
        device, "engine", "share", f"{share.engines} × {share.argument} {share.value} × {memory}", size
    )


def check_memory(settings: Settings, free: Callable[[str], int | None], *, engines: bool = True) -> None:
    """Checks, before anything is loaded, that what cannot be avoided fits in the free memory of each device.

    Weights, gradients and the optimiser's state are counted; caches and activations grow on demand. Beside
    SGLang or vLLM on the same GPU, all that the trainer needs is counted: they do not give memory back.

    Args:
        settings: Settings of the run.
        free: Returns the free memory of a device in bytes; None if unknown.
        engines: Whether engines are started, too.

    Raises:
        StartError: They do not fit.
    """
    try:
        items = run_plan(settings, free)
        models = [settings.of_policy(name).model.path for name in settings.policy_names]
        parameters = sum(read_shape(model).parameters for model in models)
    except ConfigError:  # not a plain decoder: its size is unknown
        return
    if engines and gpu_shares(settings):
        _check_shares(settings, items, free(settings.trainer.device))
    fixed = [item for item in items if item.what in ("weights", "gradients", "optimiser")]
    counted = [item for item in fixed if engines or item.owner == "trainer"]
    for device in sorted({item.device for item in counted}):
        here = [item for item in counted if item.device == device]
        needed, available = sum(item.size for item in here), free(device)
        if available is not None and needed > available:
            parts = ", ".join(f"{item.owner} {item.what} {readable(item.size)}" for item in here)
            raise StartError(
                f"model.path = {settings.model.path}: {parameters:,} parameters need at least "
                f"{readable(needed)} of memory on {device} ({parts}), and {readable(available)} are free: "
                "set trainer.lora.rank, engine.dtype = bfloat16 or engine.urls, or take a smaller model or a "
                "larger machine; tidegate train --dry-run shows the whole plan"
            )


def _check_shares(settings: Settings, items: list[Item], available: int | None) -> None:
    """Raises StartError if SGLang or vLLM may leave too little of the trainer's GPU to the trainer."""
    shares, device = gpu_shares(settings), settings.trainer.device
    needed = sum(item.size for item in items if (item.device, item.owner) == (device, "trainer"))
    limited = all(share.value is not None for share in shares)
    taken = sum(share.taken for share in shares)
    if limited and (available is None or needed <= (1 - taken) * available):
        return
    memory, what = available or TYPICAL_GPU, "free" if available else "a usual GPU"
    first = replace(shares[0], engines=sum(share.engines for share in shares))
    remedy = (
        f"set trainer.activation_checkpointing, a smaller trainer.microbatch_tokens or trainer.lora.rank, as "
        f"no engine fits beside it in {readable(memory)} ({what})"
    )
    if proposed := first.proposed(memory, needed):
        value = f'"{first.argument}={proposed:g}"'
        remedy = f"set {value} in engine.arguments, which fits in {readable(memory)} ({what})"
    raise StartError(
        f'engine.kind = "{first.kind}" uses the GPU of the trainer, which needs {readable(needed)}, and '
        f"takes {f'{taken:.0%}' if limited else 'nearly all'} of its memory: {remedy}"
    )


def _trainer_plan(trainer: TrainerSettings, shape: Shape) -> list[Item]:
    """Returns the trainer's memory; ranks share host memory, and use one GPU each."""
    tokens, device, ranks = trainer.microbatch_tokens, trainer.device, trainer.ranks
    passes, parts, copies = 1, 1, 1
    if ranks > 1 and device == "cpu":
        passes, copies = ranks, trainer.replicas
    elif ranks > 1:
        device, parts = f"each of {ranks} GPUs", ranks // trainer.replicas
    each = f" on each of {passes} ranks" if passes > 1 else ""
    beside = shape.adapter(trainer.lora.rank, trainer.lora.targets)
    trained = beside if trainer.lora.rank else shape.parameters

    def per_parameter(what: str, number: int, size: int, why: str = "") -> Item:
        held = f"{number:,} parameters" + (f" ÷ {parts}" if parts > 1 else "")
        held += f" × {copies} replicas" if copies > 1 else ""
        return Item(device, "trainer", what, f"{held} × {size} B{why}", -(-number // parts) * copies * size)

    lora = " (LoRA)" if trainer.lora.rank else ""
    return [
        per_parameter("weights", shape.parameters + beside, FLOAT32),
        per_parameter("gradients", trained, FLOAT32, lora),
        per_parameter("optimiser", trained, 2 * FLOAT32, " (AdamW)"),
        _activations(trainer, shape, device, passes, each),
        Item(
            device, "trainer", "logits", f"estimate for {tokens:,} tokens per microbatch{each}",
            passes * shape.logit_bytes(tokens, on_gpu=trainer.device != "cpu"),
        ),
        *_program(device, "trainer", passes),
    ]  # fmt: skip


def _checkpoint_plan(trainer: TrainerSettings, shape: Shape) -> list[Item]:
    """Returns the host memory of a machine that has all ranks, while a checkpoint is written or read.

    Several ranks gather the weights (and merge an adapter into a copy) and copy their moments; a single one
    on a GPU reads the weights and the moments. On the CPU it has all of them anyway.
    """
    if trainer.ranks == 1 and trainer.device == "cpu":
        return []
    number, moments = shape.parameters, 2 * FLOAT32 * trainer.replicas
    size, how = (FLOAT32 + moments) * number, f"{number:,} parameters × {FLOAT32 + moments} B"
    if trainer.lora.rank:
        beside = shape.adapter(trainer.lora.rank, trainer.lora.targets)
        size = 2 * FLOAT32 * number + moments * beside
        how = f"{number:,} × 8 B + {beside:,} × {moments} B"
    when = "while one is written" if trainer.ranks > 1 else "on --resume"
    return [Item("cpu", "trainer", "checkpoint", f"{how}, {when}", size)]


def _program(device: str, owner: str, processes: int = 1) -> list[Item]:
    """Returns the memory of Python and torch; none on a GPU."""
    how = "Python and PyTorch" + (f" in each of {processes} processes" if processes > 1 else "")
    return [Item(device, owner, "program", how, processes * PROGRAM)] if device == "cpu" else []


def _activations(trainer: TrainerSettings, shape: Shape, device: str, passes: int, each: str) -> Item:
    tokens, dtype, on_gpu = trainer.microbatch_tokens, trainer.pass_dtype, trainer.device != "cpu"
    size = shape.activation_bytes(tokens, dtype, recomputed=trainer.activation_checkpointing, on_gpu=on_gpu)
    how = f"estimate for {tokens:,} tokens per microbatch"
    if on_gpu and trainer.ranks > 1:
        size, how = size + shape.gathered_bytes(dtype), f"{how}, and the gathered weights"
    elif dtype == "bfloat16":
        size, how = size + BYTES[dtype] * shape.parameters, f"{how}, and weights in bfloat16"
    return Item(device, "trainer", "activations", how + each, passes * size)


def disk_plan(settings: Settings, shape: Shape) -> list[Item]:
    """Returns the size of the run directory: two published versions and the best one in the engine's type,
    and checkpoints in float32 with AdamW's moments and, with LoRA, the adapter."""
    trainer, number = settings.trainer, shape.parameters
    count, where = trainer.keep_checkpoints, str(settings.run_dir)
    size, how = 3 * FLOAT32 * number, f"{number:,} × 12 B"
    if trainer.lora.rank:
        beside = shape.adapter(trainer.lora.rank, trainer.lora.targets)
        size, how = FLOAT32 * (number + 3 * beside), f"({number:,} × 4 B + {beside:,} × 12 B)"
    published = BYTES[settings.engine.weights_dtype]
    whole = "published and best", f"3 × {number:,} × {published} B", 3 * number * published
    if trainer.lora.publish == "adapter":
        size_of_best = FLOAT32 * number + 2 * beside * published
        whole = "published and best", f"{number:,} × 4 B + 2 × {beside:,} × {published} B", size_of_best
    return [
        Item(where, "disk", *whole),
        Item(where, "disk", "checkpoints", f"{count} × {how}", count * size),
    ]


def readable(size: int) -> str:
    """Formats bytes as `134 MB`, in powers of ten."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 99.5 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
