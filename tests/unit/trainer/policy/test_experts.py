"""Experts of a single rank in bfloat16: their products are, and their gradients are float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import moe

from tests.tiny import make_tiny_model
from tests.unit.trainer.learning_fixtures import make_rows
from tidegate.config import TrainerSettings
from tidegate.trainer.policy import routing
from tidegate.trainer.policy.policy import Policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_experts_are_in_the_dtype_of_the_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    make_tiny_model(tmp_path / "base", vocab=640, hidden=32, family="qwen3_moe")
    policy = Policy.load(tmp_path / "base", TrainerSettings(compute_dtype=dtype))
    types = set()
    plain = moe._grouped_linear

    def recorded(*tensors: Any, **options: Any) -> Any:
        types.update(tensor.dtype for tensor in tensors[:2])
        return plain(*tensors, **options)

    monkeypatch.setattr(moe, "_grouped_linear", recorded)
    policy.backward(make_rows(4), version=3)
    assert types == {getattr(torch, dtype)}
    gradients = {name: one.grad for name, one in policy.model.named_parameters() if "experts" in name}
    assert len(gradients) == 4
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.dtype is torch.float32
        assert gradient.abs().sum() > 0, name


def test_results_of_experts_have_the_type_of_their_input(tmp_path: Path) -> None:
    """The layers around them add in float32."""
    base = tmp_path / "base"
    make_tiny_model(base, vocab=640, hidden=32, family="qwen3_moe")
    policy = Policy.load(base, TrainerSettings(compute_dtype="bfloat16"))
    found = [one for one in policy.model.modules() if type(one).__name__.endswith("Experts")]
    hidden, index = torch.randn(6, 32), torch.zeros(6, 1, dtype=torch.long)
    weights = torch.ones(6, 1)
    with torch.no_grad():
        exact = routing.experts(found[0], hidden, index, weights)
        with torch.autocast("cpu", torch.bfloat16):
            result = routing.experts(found[0], hidden, index, weights)
    assert (exact.dtype, result.dtype) == (torch.float32, torch.float32)
    assert not torch.equal(exact, result), "its products were rounded"
    assert torch.allclose(exact, result, atol=0.05)
