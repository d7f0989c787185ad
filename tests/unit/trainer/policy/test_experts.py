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
