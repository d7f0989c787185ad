"""Activation checkpointing: gradients identical bit for bit, with less memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from tests.tiny import make_tiny_model
from tests.unit.trainer.learning_fixtures import VOCABULARY, make_group, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import StartError
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.activation_checkpointing import checkpoint_layers
from tidegate.trainer.policy.policy import Policy


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def rows_that_share() -> list[TrainingSequence]:
    """Groups with prompts in common, of three lengths, and rows without."""
    rng = np.random.default_rng(0)
    groups = [make_group(rng, size=4, prompt=prompt, group=f"g{prompt}") for prompt in (40, 25, 30)]
    return [*make_rows(4), *(row for group in groups for row in group)]


def gradients(base: Path, rows: list[TrainingSequence], **settings: object) -> dict[str, torch.Tensor]:
    policy = Policy.load(base, TrainerSettings(microbatch_tokens=200, **settings))
    policy.update(rows, version=3)
    return {name: one.grad for name, one in policy.model.named_parameters()}


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_those_without_it_bit_for_bit(base: Path, shared: bool, compute_dtype: str) -> None:
    rows = rows_that_share() if shared else make_rows(12)
    assert any(bundle.prefixes for bundle in prefix_batches(rows, 200)) == shared
    plain = gradients(base, rows, compute_dtype=compute_dtype)
    again = gradients(base, rows, compute_dtype=compute_dtype, activation_checkpointing=True)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_another_family_of_models(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, VOCABULARY, hidden=32, family="llama")
    plain = gradients(tmp_path, rows_that_share())
    again = gradients(tmp_path, rows_that_share(), activation_checkpointing=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def kept(base: Path, rows: list[TrainingSequence], **settings: object) -> int:
    """Bytes that the forward passes of a bundle allocate and leave to the way back."""
    policy = Policy.load(base, TrainerSettings(**settings))
    (bundle,) = prefix_batches(rows, 8192)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as told:
        prefix = policy._forward.prefix(bundle)
        losses = [policy._forward(batch, prefix)[0] for batch in bundle.microbatches]
    assert losses[0].requires_grad
    return sum(event.self_cpu_memory_usage for event in told.key_averages())


@pytest.mark.parametrize("prompt", [1, 60])
def test_checkpointing_keeps_fewer_activations(base: Path, prompt: int) -> None:
    rows = make_group(np.random.default_rng(1), size=4, prompt=prompt, replies=(120, 120))
    assert kept(base, rows, activation_checkpointing=True) < 0.2 * kept(base, rows)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_a_layer_puts_its_keys_into_a_cache_once(argument: str) -> None:
    cache, layer = DynamicCache(), torch.nn.Identity()
    keys = torch.ones(1, 2, 3, 4, requires_grad=True)
    layer.forward = lambda keys, **more: more[argument].update(keys, keys, 0)[0].square()
    checkpoint_layers([layer])
    layer(keys, **{argument: cache}).sum().backward()
    assert cache.get_seq_length() == 3
    assert torch.equal(keys.grad, 2 * keys)


def test_a_model_without_named_layers_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.load(base, TrainerSettings())
    monkeypatch.setattr(type(policy.model), "_no_split_modules", None)
    policy.model._no_split_modules = None
    with pytest.raises(StartError, match="does not name its decoder layers"):
        Policy(policy.model, base, TrainerSettings(activation_checkpointing=True))
