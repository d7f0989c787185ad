"""Runs a pass, its loss, a publish and decode steps on a fake device: `python -m tests.fake_accelerator`.

Its tensors have shapes and no values. An operation on tensors of two devices raises. Prints a JSON object
with the numbers of microbatches and decode steps, and the copies to and from the accelerator.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import Qwen3Config, Qwen3ForCausalLM, masking_utils

from tests.unit.trainer.learning_fixtures import VOCABULARY, make_group, make_rows
from tidegate.config import TrainerSettings
from tidegate.engine.model.model import Model
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import parse_generate
from tidegate.engine.scheduling.slots import Slots
from tidegate.trainer.policy import attention, forward, policy
from tidegate.trainer.policy.diagnostics import Diagnostics

DEVICE = "fakegpu"
DECODED = 3
KINDS: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 5}, {"presence_penalty": 0.5}]


class Copies(TorchDispatchMode):
    """Counts copies between host and accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device: list[str] = []
        self.to_host: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before, after = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in (args, out)
        )
        if before and after and before[0].device != after[0].device:
            copies = self.to_host if after[0].device.type == "cpu" else self.to_device
            copies.append(f"{func} {tuple(before[0].shape)}")
        return out


def on_accelerator(model: Any) -> Any:
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                empty = torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
                moved.setdefault(id(value), torch.nn.Parameter(empty, requires_grad=False))
                module._parameters[name] = moved[id(value)]
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
    return model


def decode(hf_model: Any, kind: dict[str, Any]) -> None:
    """Samples DECODED tokens of three requests with the embedded engine's model."""
    model = Model(hf_model, max_slots=4, max_context=64)
    limits = TokenLimits(model.vocab_size, model.max_context, model.eos_ids, False)
    slots = Slots(model.max_slots)
    prompts = ([5, 3, 8], [7, 1, 2, 9], [4, 6])
    model.prefill(0, [prompt[:-1] for prompt in prompts], [0] * len(prompts))
    for prompt in prompts:
        slots.add(
            parse_generate({"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, **kind}}, limits)
        )
    for _ in range(DECODED):
        ids, _ = model.decode(slots)
        slots.advance(ids)


def main() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    settings = TrainerSettings(device="cuda", microbatch_tokens=128, learning_rate=1e-6)
    made, shared = torch.tensor, torch.from_numpy

    def from_numpy(array: np.ndarray) -> torch.Tensor:
        return torch.empty(array.shape, dtype=shared(array).dtype)

    def tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        value = torch.empty(0, **options) if data == [] else made(data, *args, **options)
        return value if device is None else value.to(device)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch, "tensor", tensor),
            (torch, "from_numpy", from_numpy),
            (policy, "adamw", lambda *_: mock.Mock()),
            (forward, "_can_split", lambda *_: True),
            (forward.Forward, "_can_share", lambda _: True),
            (torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
            (torch, "is_autocast_enabled", lambda *_: False),
            (fake_tensor, "CONSTANT_NUMEL_LIMIT", 0),  # else single numbers are computed, on no device
            (masking_utils, "is_tracing", lambda *_: False),
            (attention, "causal_lower_right", lambda *_: None),  # a kind of tensor that cannot be a fake one
            (masking_utils, "find_packed_sequence_indices", lambda _: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = on_accelerator(Qwen3ForCausalLM(config).eval())
        held = policy.Policy(model, Path(tempfile.mkdtemp()), settings)
        rows = [*make_rows(6), *make_group(np.random.default_rng(0), size=4, prompt=40, group="g40")]
        (share,) = held._split(rows)
        diagnostics, microbatches = Diagnostics(0), 0
        with torch.no_grad(), Copies() as copies:
            for batch in held._forward.layout(share):
                prefix = held._forward.prefix(batch)
                for microbatch in batch.microbatches:
                    microbatch = microbatch.to(held._forward.device)
                    logprobs_n, entropy_n, _ = held._forward(microbatch, prefix)
                    _, clipped_n = held._loss(logprobs_n, microbatch, 1.0)
                    diagnostics.add(logprobs_n, entropy_n, clipped_n, microbatch)
                    microbatches += 1
            assert logprobs_n.device.type == DEVICE
            computed = len(copies.to_host)
            for bucket in held.weight_buckets(2**20, "bfloat16", on_device=True):
                assert {value.device.type for value in bucket.values()} == {DEVICE}
        fetch = mock.patch.object(torch.Tensor, "numpy", lambda value: np.zeros(value.shape))
        decoded = Copies()
        with fetch, decoded:
            for kind in KINDS:
                decode(model, kind)
    print(
        json.dumps({
            "microbatches": microbatches, "to_device": copies.to_device, "to_host": copies.to_host[:computed],
            "published": copies.to_host[computed:],
            "decoded": DECODED * len(KINDS), "sampled": decoded.to_host,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
