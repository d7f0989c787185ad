"""A GPU computes with a copy in bfloat16, and trains parameters in float32; here the copy is on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.trainer.learning_fixtures import make_group, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.checkpoint.huggingface import read_model
from tidegate.trainer.policy import forward, head
from tidegate.trainer.policy.forward import decoder_layers
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.policy.ranks import Ranks

SMALL = 1e-5
"""A learning rate whose steps are lost in weights of bfloat16, which near 0.05 are 2e-4 apart."""


class OnCPU(Ranks):
    def read_model(self, path: Path) -> Any:
        return read_model(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def load(base: Path, device: str = "cuda", **settings: object) -> Policy:
    """A policy with the settings of a device; its model stays on the CPU."""
    chosen = TrainerSettings(**{"device": device, "max_grad_norm": 1e9, "learning_rate": SMALL, **settings})
    return Policy(read_model(base).eval(), base, chosen, ranks=OnCPU(chosen))


def batch() -> list[TrainingSequence]:
    return [*make_rows(4), *make_group(np.random.default_rng(0), size=4, prompt=40, group="g40")]


def on_policy(base: Path) -> list[TrainingSequence]:
    rows = batch()
    for row, logprobs in zip(rows, load(base, "cpu").logprobs(rows), strict=True):
        row.logprobs = logprobs
    return rows


def apart(expected: Any, found: Any) -> float:
    gap = torch.stack([(a - b).norm() for a, b in zip(expected, found, strict=True)]).norm()
    return float(gap / torch.stack([one.norm() for one in expected]).norm())


def copies(policy: Policy) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a layer's parameter and its copy."""
    models = (policy.model, policy._forward.model)
    exact, rounded = ([p for layer in decoder_layers(one) for p in layer.parameters()] for one in models)
    return list(zip(exact, rounded, strict=True))


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_gradients_are_those_of_float32_up_to_rounding(base: Path, activation_checkpointing: bool) -> None:
    rows = on_policy(base)
    policies = [
        load(base, "cpu"), load(base, activation_checkpointing=activation_checkpointing),
    ]  # fmt: skip
    for policy in policies:
        policy.backward(rows, version=3)
    assert policies[1]._forward.shares
    exact, found = ([one.grad for one in policy.model.parameters()] for policy in policies)
    assert {one.dtype for one in found} == {torch.float32}
    assert {copied.dtype for _, copied in copies(policies[1])} == {torch.bfloat16}
    assert all(copied.grad is None for _, copied in copies(policies[1]))
    assert 1e-4 < apart(exact, found) < 0.03


def test_steps_smaller_than_bfloat16_add_up(base: Path) -> None:
    rows, moved = on_policy(base), []
    for device in ("cpu", "cuda"):
        policy = load(base, device)
        before = [one.detach().clone() for one in policy.model.parameters()]
        for _ in range(3):
            policy.update(rows, version=3)
        moved.append([one.detach() - old for one, old in zip(policy.model.parameters(), before, strict=True)])
        assert device == "cpu" or all(torch.equal(a.to(torch.bfloat16), b) for a, b in copies(policy))
    assert apart(*moved) < 0.3  # Adam's steps are ±rate, and rounding turns the signs of small gradients


def test_a_resumed_run_has_the_parameters_in_float32(base: Path, tmp_path: Path) -> None:
    rows, policy = on_policy(base), load(base)
    policy.update(rows, version=3)
    policy.save_weights(tmp_path / "saved")
    policy.save_state(tmp_path / "trainer.pt")
    resumed = load(base)
    resumed.load_state_from(tmp_path / "trainer.pt")
    resumed.load_weights(tmp_path / "saved")
    assert resumed.logprobs(rows)[0].tolist() == policy.logprobs(rows)[0].tolist()
    for one in (policy, resumed):
        one.update(rows, version=3)
    assert {one.dtype for one in resumed.weights().values()} == {torch.float32}
    assert all(torch.equal(one, resumed.weights()[name]) for name, one in policy.weights().items())


@pytest.mark.slow  # importing the compiler takes most of its 7 CPU seconds
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_compiled_layers_give_the_same_gradients(
    base: Path, monkeypatch: pytest.MonkeyPatch, activation_checkpointing: bool
) -> None:
    backend = "aot_eager"  # graphs as in production, which the compiler for C++ takes minutes to compile
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    head._compiled.cache_clear()
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE_ON_GPU", 600)  # in pieces
    rows, found = on_policy(base), []
    for compile_ in (False, True):
        policy = load(base, compile=compile_, activation_checkpointing=activation_checkpointing)
        policy._forward.shares = False  # a layer with a cache is not compiled
        policy.backward(rows, version=3)
        policy.backward(rows[:3], version=3)  # of another size
        found.append([one.grad for one in policy.model.parameters()])
    head._compiled.cache_clear()
    assert apart(*found) < 0.02  # compiled operations round less often


@pytest.mark.slow  # as above
def test_many_kinds_of_layers_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's limit of eight, further variants would run uncompiled: Qwen3-Next, Gemma 3."""

    class Layer(torch.nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * len(self.kind)

    limits = torch._dynamo.config
    monkeypatch.setattr(limits, "recompile_limit", 8)  # restored afterwards
    monkeypatch.setattr(limits, "fail_on_recompile_limit_hit", True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    layers = [Layer("a" * number) for number in range(12)]
    forward._compile_layers(layers)
    for number, layer in enumerate(layers):
        assert layer(torch.ones(3)).tolist() == [number] * 3
