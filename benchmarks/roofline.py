"""Predicts the optimiser step, its peak memory, a publish and host memory on GPUs, without one.

    python benchmarks/roofline.py [--json] [--shape qwen3-0.6b …] [--gpus 1 8]

The trainer's own step runs under FakeTensor at the real sizes: nothing is computed and no memory is used, but
every operation is seen, with its shapes and the life of its results. Several GPUs are ranks of a fake process
group.

- *Seconds*: each operation takes the longer of its FLOPs at the rate of a large matmul and its bytes at
  the rate of a large copy (`GPUS`); attention has rates of its own. A pass takes the longest of these
  sums, the host's launches, and the transfers between GPUs, which overlap with the operations.
- *MFU*: useful FLOPs (6 a parameter and token, logits of trained tokens only, causal attention) of the
  forward and backward pass of a microbatch of 8 × 1,024 tokens on each GPU, the last half of each row
  trained, as a share of the rate of a large matmul, as `gpu.py` measures it: `mfu` with the default settings,
  `mfu_compiled` with `trainer.compile`. `mfu_step` and `mfu_step_compiled` are of a step with one such
  microbatch, including the optimiser. Names that end with `_of_989` are shares of the data sheet's rate.
- *Compiled* is a bound: within a part that `trainer.compile` compiles (the forward or backward pass of a
  decoder layer, the operations on logits) those between two matmuls are one kernel, which reads each input
  once and writes each result that is used later once. The checks of MFU are of `mfu_compiled`.
- *Peak*: largest sum of the storages alive in a step, including AdamW. `plan` is the estimate of `tidegate
  train --dry-run`. It `fits` if the GPU has it besides a reserve (`CONTEXT`, `FRAGMENTED`).
- *Publish*: the weights in bfloat16 by broadcast to engines behind a link of 400 Gb/s (`publish_s`).
- *Host memory* is not recorded but derived, by the formulas `host_gb_resume_how` and `host_gb_save_how`.

Nothing here was measured on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers.masking_utils
from common import Check, parser_of, report
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

from tidegate.config import Settings, TrainerSettings
from tidegate.plan.memory import _trainer_plan
from tidegate.plan.shape import PUBLISHED, read_shape
from tidegate.trainer.batch.microbatch import PrefixBatch
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.distributed import fsdp
from tidegate.trainer.policy import forward, head
from tidegate.trainer.policy.diagnostics import Diagnostics
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.policy.ranks import Ranks
from tidegate.trainer.publish.broadcast import DEVICE_BUCKET_BYTES
from tidegate.weights import float_logits

ROWS, TOKENS = 8, 1024
"""Rows of a GPU's microbatch, and tokens of a row."""
SHAPES = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-30b-a3b")


DATA_SHEET_FLOPS_S = 989e12
"""FLOPs per second of H100 and H200 in bfloat16."""


@dataclass(frozen=True)
class GPU:
    """Rates that large operations reach on a GPU: 0.8 of the data sheet's FLOPs, 0.9 of its bandwidth."""

    memory: float
    bytes_s: float
    flops_s: float = 0.8 * DATA_SHEET_FLOPS_S
    attention: tuple[float, float] = (400e12, 320e12)
    """FLOPs per second of FlashAttention-2, forward and backward."""
    link_bytes_s: float = 350e9
    """Bytes per second to the other GPUs of the machine."""


GPUS = {"h100": GPU(80e9, 0.9 * 3.35e12), "h200": GPU(141e9, 0.9 * 4.8e12)}
CONTEXT, FRAGMENTED = 1e9, 0.05
"""Reserve: bytes of CUDA's context and the libraries' workspaces, and the share of the memory that torch's
allocator cannot use. Both are assumed."""
LAUNCH_S = 8e-6
"""Seconds of the host for an operation."""
SMALLEST_S = 3e-6
"""Seconds of the shortest operation on the device."""
FREE = {"detach", "_unsafe_view", "empty", "empty_like", "alias", "lift_fresh", "device", "wait_tensor"}
"""Operations besides views that launch nothing."""
NETWORK_BYTES_S = 50e9
"""A network link of 400 Gb/s."""
CALL_S, CONTROL_CALLS = 5e-3, 6
"""Seconds of a call of an engine, and the calls of a publish besides one for each bucket."""
RANK_GB = 1.5
"""Host memory of a rank besides its tensors: torch, CUDA and its context."""


@dataclass(slots=True)
class Operation:
    """An operation: its FLOPs, the bytes that it reads and writes by storage, and its kind."""

    name: str
    flops: float
    kind: str
    reads: dict[int, int]
    writes: dict[int, int]
    part: str | None = None
    """The part that `trainer.compile` would compile with this operation."""

    @property
    def size(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    def seconds(self, gpu: GPU) -> float:
        if self.kind == "attention":
            return self.flops / gpu.attention["backward" in self.name]
        return max(self.flops / gpu.flops_s, self.size / gpu.bytes_s, SMALLEST_S)


class Recorder(TorchDispatchMode):
    """Records operations, the parts to which they belong, and the memory of living storages."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.sent = 0.0
        """Bytes to and from other GPUs."""
        self.peak = self.alive = 0
        self._part: str | None = None
        self._nodes: list[tuple[int, int, str]] = []
        """Range of the numbers of a part's nodes in the graph for the backward pass, and the part."""
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._numbered = itertools.count()

    def track(self, tensor: Tensor) -> int:
        """Counts a tensor's storage, and returns its number."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if (key := storage._cdata) not in self._sizes:
            self._sizes[key], self._numbers[key] = 0, next(self._numbered)
            weakref.finalize(storage, self._forget, key)
        self._resize(key, storage.nbytes())
        return self._numbers[key]

    def _resize(self, key: int, size: int) -> None:
        self.alive += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.alive)

    def _forget(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)

    @contextlib.contextmanager
    def resizes(self) -> Iterator[None]:
        """Follows FSDP, which frees and allocates gathered parameters by resizing their storage."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def inside(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, whose operations and their derivatives belong to a part."""

        def call(*inputs: Any, **more: Any) -> Any:
            outer, self._part = self._part, part
            first = torch._C._autograd._get_sequence_nr()
            try:
                return function(*inputs, **more)
            finally:
                self._part = outer
                self._nodes.append((first, torch._C._autograd._get_sequence_nr(), part))

        return call

    def part(self) -> str | None:
        """Returns the part of the operation that is called now."""
        node = torch._C._current_autograd_node()
        if self._part is not None or node is None:
            return self._part
        number = node._sequence_nr()
        found = (part for first, end, part in reversed(self._nodes) if first <= number < end)
        return next((f"{part}, backward" for part in found), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        reads, writes = ({self.track(one): one.nbytes for one in some} for some in (inputs, outputs))
        if func.is_view or name in FREE or not outputs:
            return out
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sent += max([*reads.values(), *writes.values()])
            return out
        kind, flops = "other", 0.0
        if "scaled_dot_product" in name:
            back = "backward" in name
            (rows, heads, queries, width), keys = inputs[back].shape, inputs[back + 1].shape[2]
            kind, flops = "attention", 2.0 * rows * heads * queries * keys * width * (2.5 if back else 1.0)
        elif name == "_grouped_mm":
            left, right = inputs[:2]
            kind, flops = "matmul", 2.0 * left.shape[-2] * left.shape[-1] * right.shape[-1]
        elif func._overloadpacket in flop_registry:
            kind, flops = "matmul", flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        self.operations.append(Operation(name, flops, kind, reads, writes, self.part()))
        return out


def fused(operations: Sequence[Operation], later: Sequence[Operation]) -> list[Operation]:
    """Joins the operations between two matmuls of a compiled part to one each.

    `later` operations may use their results, too.
    """
    last = {number: at for at, one in enumerate([*operations, *later]) for number in one.reads}
    result, at = [], 0
    for (matmul, part), run in itertools.groupby(operations, lambda one: (one.kind != "other", one.part)):
        joined = list(run)
        at += len(joined)
        if matmul or part is None:
            result += joined
            continue
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for one in joined:
            for number, size in one.reads.items():
                if number not in writes:
                    reads[number] = max(size, reads.get(number, 0))
            writes |= one.writes
        kept = {number: size for number, size in writes.items() if last.get(number, -1) >= at}
        result.append(Operation("fused", 0.0, "other", reads, kept, part))
    return result


class OneRank(Ranks):
    """One GPU, on which no value is read."""

    def sum(self, value: Tensor) -> float:
        return 1.0


class ManyRanks(fsdp.FSDPRanks):
    def agree(self, value: Any) -> Any:
        return value()

    def _fill(self, *_: Any) -> None:
        pass

    def sum(self, value: Tensor) -> float:
        return 1.0


@contextlib.contextmanager
def fake_step() -> Iterator[None]:
    """Skips the code of a step that reads values, and takes a GPU's branches."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right, out_dtype=torch.float32)

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(head, "product", product),
        mock.patch.object(float_logits, "product", product),
        mock.patch.object(forward, "_can_split", return_value=True),
        mock.patch.object(torch.nn.Module, "to_empty", lambda module, **_: module),  # sharded where they are
        mock.patch.object(forward.Forward, "_can_share", return_value=False),
        mock.patch.object(PrefixBatch, "passes", property(lambda _: [])),
        mock.patch.object(transformers.masking_utils, "is_tracing", return_value=False),
        mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", return_value=None),
    ):
        yield


def rows_of(count: int, vocabulary: int) -> list[TrainingSequence]:
    """Random rows without shared prefixes; the last half of each is trained."""
    rng = np.random.default_rng(0)
    return [
        TrainingSequence(
            ids=rng.integers(0, vocabulary, TOKENS).astype(np.int32),
            mask=np.arange(TOKENS) >= TOKENS // 2,
            logprobs=np.full(TOKENS, -np.log(vocabulary), np.float32),
            versions=np.zeros(TOKENS, np.int64),
            temperature=np.ones(TOKENS, np.float32),
            advantages=np.full(TOKENS, (-1.0) ** index, np.float32),
            group_id=str(index // 8),
        )
        for index in range(count)
    ]


@dataclass(frozen=True)
class Recorded:
    """A step of one GPU: its microbatch's pass, its optimiser's operations, and its peak memory."""

    passed: list[Operation]
    stepped: list[Operation]
    sent: float
    peak: int
    config: Any
    parameters: int
    settings: TrainerSettings


def layers_of(model: Any) -> list[Any]:
    """Returns the decoder layers; FSDP has changed their class to one whose name has a prefix."""
    names = set(model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def recorded(name: str, gpus: int, *, checkpointing: bool = False) -> Recorded:
    """Runs a step of the model on the first of several fake GPUs."""
    config = AutoConfig.for_model(**PUBLISHED[name], max_position_embeddings=40960)
    settings = TrainerSettings(
        device="cuda", ranks=gpus, microbatch_tokens=ROWS * TOKENS, activation_checkpointing=checkpointing
    )
    mesh = None
    if gpus > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
        mesh = init_device_mesh("cpu", (gpus,))
    try:
        recorder = Recorder()
        with fake_step(), recorder.resizes(), mock.patch.object(fsdp, "init_device_mesh", return_value=mesh):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            parameters = model.num_parameters()
            ranks = OneRank(settings) if mesh is None else ManyRanks(settings, dist.HashStore())
            policy = Policy(model, Path(tempfile.gettempdir()), settings, ranks=ranks)
            share = policy._split(rows_of(ROWS * gpus, config.vocab_size))[0]
            for parameter in model.parameters():
                recorder.track(parameter)
            for number, layer in enumerate(layers_of(policy._forward.model)):
                layer.forward = recorder.inside(f"layer {number}", layer.forward)
            on_logits = {name: recorder.inside(name, getattr(head, name)) for name in ("_score", "_gradient")}
            with recorder, mock.patch.multiple(head, **on_logits):
                step = policy._begin_step()
                step.accumulate(share, Diagnostics(0))
                ended = len(recorder.operations)
                policy._step(step, 1e-6)  # allocates AdamW's moments
                operations, sent = list(recorder.operations), recorder.sent
                # Of a second microbatch: gradients and moments are there, and activations come on top.
                recorder.peak = recorder.alive
                step.accumulate(share, Diagnostics(0))
    finally:
        if gpus > 1:
            dist.destroy_process_group()
    return Recorded(operations[:ended], operations[ended:], sent, recorder.peak, config, parameters, settings)


def record(name: str, gpus: str, file: str) -> None:
    """Writes the result of `recorded` to a file, which is complete as soon as it exists."""
    unfinished = Path(f"{file}.unfinished")
    unfinished.write_bytes(pickle.dumps(recorded(name, int(gpus))))
    unfinished.rename(file)


def recorded_alone(name: str, gpus: int, tries: int = 3) -> Recorded:
    """`recorded` in a process of its own; raises CalledProcessError if it crashes in every try.

    Several sharded shapes in one process break the heap of torch 2.13 (a segmentation fault of 30B-A3B on 8);
    so does 30B-A3B in a worker of a process pool in about half of its runs. Alone it crashes sometimes, on a
    busy machine twice in a row. A process that crashes after its result is written has recorded it.
    """
    code = "import sys, roofline; roofline.record(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recorded"
        command = [sys.executable, "-W", "ignore", "-c", code, name, str(gpus), str(file)]
        done = subprocess.run(command, cwd=Path(__file__).parent, check=False)
        if file.exists():
            run: Recorded = pickle.loads(file.read_bytes())
            return run
    if tries == 1:
        raise subprocess.CalledProcessError(done.returncode, done.args)
    print(
        f"{name} on {gpus} ended with {done.returncode}, and is recorded again", file=sys.stderr, flush=True
    )
    return recorded_alone(name, gpus, tries - 1)


def useful_flops(config: Any, parameters: int) -> float:
    """FLOPs of the microbatch's forward and backward pass that no implementation can avoid."""
    embedding = config.vocab_size * config.hidden_size
    body = parameters - embedding * (1 if config.tie_word_embeddings else 2)
    if experts := getattr(config, "num_experts", 0):
        one = 3 * config.hidden_size * config.moe_intermediate_size
        body -= config.num_hidden_layers * (experts - config.num_experts_per_tok) * one
    inputs = TOKENS - 1
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * inputs**2
    return ROWS * (6.0 * body * inputs + 6.0 * embedding * (TOKENS // 2) + 3.0 * attention)


def publish_s(parameters: int, gpus: int, gpu: GPU) -> float:
    """Seconds to send weights in bfloat16 from device memory: one bucket is cast, gathered and summed up for
    the checksum while the one before is sent."""
    size, calls = 2.0 * parameters, math.ceil(4 * parameters / DEVICE_BUCKET_BYTES) + CONTROL_CALLS
    gathered = (4 + 2 + 2) * parameters / gpu.bytes_s + (size / gpu.link_bytes_s if gpus > 1 else 0.0)
    return max(gathered, size / NETWORK_BYTES_S) + calls * CALL_S


def host_gb(parameters: int, gpus: int) -> dict[str, Any]:
    """Derives the host memory of a machine whose ranks resume, and of one whose ranks write a checkpoint.

    Rank 0 reads the float32 model, and sends shards of one tensor at a time; a single rank reads AdamW's
    moments, too, several read their shards of one tensor at a time. To write, rank 0 gathers the model, and
    several ranks copy their moments. See `test_ranks.py`.
    """
    resume, save = (12, 4) if gpus == 1 else (4, 12)
    figures: dict[str, Any] = {}
    for when, size in (("resume", resume), ("save", save)):
        figures[f"host_gb_{when}"] = gpus * RANK_GB + size * parameters / 1e9
        figures[f"host_gb_{when}_how"] = f"derived: {gpus} ranks × {RANK_GB} GB + {parameters:,} × {size} B"
    return figures


def predicted(name: str, gpus: int, run: Recorded) -> list[dict[str, Any]]:
    shape = read_shape(Path(name))
    settings = Settings.model_construct(trainer=run.settings)
    plan = sum(item.size for item in _trainer_plan(settings.trainer, shape))
    useful = useful_flops(run.config, run.parameters)
    rows = []
    together = fused(run.passed, run.stepped)

    def pass_s(operations: Sequence[Operation], gpu: GPU) -> float:
        device = sum(one.seconds(gpu) for one in operations)
        return max(device, len(operations) * LAUNCH_S, run.sent / gpu.link_bytes_s)

    for kind, gpu in GPUS.items():
        seconds, fused_s = pass_s(run.passed, gpu), pass_s(together, gpu)
        optimizer_s = sum(operation.seconds(gpu) for operation in run.stepped)
        times = {
            "mfu": seconds, "mfu_compiled": fused_s,
            "mfu_step": seconds + optimizer_s, "mfu_step_compiled": fused_s + optimizer_s,
        }  # fmt: skip
        rows.append({
            "shape": name, "gpus": gpus, "gpu": kind,
            "pass_ms": 1e3 * seconds, "compiled_ms": 1e3 * fused_s,
            "sent_ms": 1e3 * run.sent / gpu.link_bytes_s,
            "optimizer_ms": 1e3 * optimizer_s,
            **{what: useful / taken / gpu.flops_s for what, taken in times.items()},
            **{f"{what}_of_989": useful / taken / DATA_SHEET_FLOPS_S for what, taken in times.items()},
            "peak_gb": run.peak / 1e9, "plan_gb": plan / 1e9, "peak_vs_plan": run.peak / plan,
            "fits": run.peak < (1 - FRAGMENTED) * gpu.memory - CONTEXT,
            "publish_s": (published := publish_s(run.parameters, gpus, gpu)),
            "publish_vs_bandwidth": published * NETWORK_BYTES_S / (2.0 * run.parameters),
            **host_gb(run.parameters, gpus),
        })  # fmt: skip
    return rows


def costs(run: Recorded, gpu: GPU) -> dict[str, Any]:
    """The most expensive operations of the pass, in milliseconds."""
    spent: Counter[str] = Counter()
    for operation in run.passed:
        spent[operation.name] += 1e3 * operation.seconds(gpu)
    return {name: round(value, 1) for name, value in spent.most_common(8)}


def checks(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """The checks of the rows; those of a shape that was not recorded fail, and one names it."""
    failed = [row for row in rows if "failed" in row]
    at = {(row["shape"], row["gpus"], row["gpu"]): row for row in rows if "failed" not in row}
    ratios = [row["peak_vs_plan"] for row in at.values()]
    at |= {(row["shape"], row["gpus"], kind): {} for row in failed for kind in GPUS}
    found = [
        Check(name, at[where].get(figure), op, goal)
        for name, where, figure, op, goal in (
            ("mfu_0p6b_8x1k_h200", ("qwen3-0.6b", 1, "h200"), "mfu_compiled", ">=", 0.45),
            ("mfu_4b_8x1k_h200", ("qwen3-4b", 1, "h200"), "mfu_compiled", ">=", 0.5),
            ("publish_4b_vs_bytes_over_50GBps", ("qwen3-4b", 1, "h200"), "publish_vs_bandwidth", "<=", 3.0),
            ("host_gb_per_node_8b_resume", ("qwen3-8b", 8, "h200"), "host_gb_resume", "<=", 80.0),
        )
        if where in at
    ]
    return [
        *found,
        Check("peak_vs_plan_smallest", min(ratios, default=None), ">=", 0.85),
        Check("peak_vs_plan_largest", max(ratios, default=None), "<=", 1.1),
        *(Check(f"recorded_{row['shape']}_on_{row['gpus']}", None, "==", 1.0) for row in failed),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=PUBLISHED, nargs="+", default=SHAPES)
    parser.add_argument("--gpus", type=int, nargs="+", default=(1, 8))
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for name, gpus in itertools.product(given.shape, given.gpus):
        try:
            run = recorded_alone(name, gpus)
        except subprocess.CalledProcessError as error:
            rows.append({"shape": name, "gpus": gpus, "failed": str(error)})
            continue
        rows += predicted(name, gpus, run)
        print(f"{name} on {gpus}: ms by operation on an h200: {costs(run, GPUS['h200'])}", flush=True)
    return report(rows, checks(rows), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
