"""Logits in float32 of products in bfloat16, and the gradients of both factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_model
from tidegate.engine.model.model import Model
from tidegate.weights.float_logits import float_logits, use_float_logits


def test_logits_and_gradients_are_sums_in_float32_of_rounded_factors() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((6, 32), (50, 32)))
    signal = torch.randn(6, 50)
    with torch.autocast("cpu", torch.bfloat16):
        logits = float_logits(hidden, weight, torch.bfloat16)
    logits.backward(signal)
    rounded = [tensor.detach().bfloat16().double() for tensor in (hidden, weight, signal)]
    assert logits.dtype is torch.float32
    for found, left, right in (
        (logits, rounded[0], rounded[1].T),
        (hidden.grad, rounded[2], rounded[1]),
        (weight.grad, rounded[2].T, rounded[0]),
    ):
        assert found is not None
        assert torch.allclose(found.double(), left @ right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_in_bfloat16_returns_logits_that_are_not_rounded(tmp_path: Path, family: str) -> None:
    model = make_tiny_model(tmp_path / "base", family=family).bfloat16()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        rounded = model(input_ids=ids, use_cache=False).logits
        use_float_logits(model)
        logits = model(input_ids=ids, use_cache=False).logits
    assert (rounded.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(logits.bfloat16(), rounded), "no other numbers, but all their digits"
    assert not torch.equal(logits, rounded.float())


class OnCUDA(str):
    """The name of the CPU for torch, of a GPU for its readers."""

    type = "cuda"


def test_an_engine_on_a_gpu_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = make_tiny_model(tmp_path / "base").bfloat16()
    monkeypatch.setattr(type(hf_model), "device", OnCUDA("cpu"))
    model = Model(hf_model, 2, 64)
    assert "forward" in vars(model.hf_model.get_output_embeddings())


def test_an_engine_on_a_cpu_does_not_use_them(tmp_path: Path) -> None:
    """Products in float32 of a head in bfloat16 cost a copy of the head for each token there."""
    model = Model(make_tiny_model(tmp_path / "base").bfloat16(), 2, 64)
    assert "forward" not in vars(model.hf_model.get_output_embeddings())
