"""Linear layers by oneDNN compute what the plain ones do, forward and backward."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_model
from tidegate.weights import onednn
from tidegate.weights.onednn import OneDNNLinear, use_onednn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch is built without oneDNN"
)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses oneDNN for all layers, on any machine."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "MIN_WEIGHTS", 1)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_logits_and_gradients_are_those_of_the_plain_layers(tmp_path: Path, family: str, tokens: int) -> None:
    plain = make_tiny_model(tmp_path / "base", family=family)
    model = deepcopy(plain)
    use_onednn(model)
    assert any(isinstance(module, OneDNNLinear) for module in model.modules())
    ids = torch.arange(2 * tokens).reshape(2, tokens)
    found, expected = (one(input_ids=ids, use_cache=False).logits for one in (model, plain))
    assert torch.allclose(found, expected, atol=1e-5)
    for logits in (found, expected):
        logits.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4 * float(theirs.grad.abs().max()))
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)


@pytest.mark.usefixtures("everywhere")
def test_a_bias_and_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.Linear(12, 7)
    layer = deepcopy(plain)
    layer.__class__ = OneDNNLinear
    inputs = torch.randn(3, 5, 12)
    signal = torch.randn(3, 5, 7)
    for one in (plain, layer):
        one(inputs).backward(signal)
    assert plain.bias.grad is not None
    assert layer.bias.grad is not None
    assert torch.allclose(layer(inputs), plain(inputs), atol=1e-5)
    assert torch.allclose(layer.bias.grad, plain.bias.grad, atol=1e-5)


def test_a_model_in_bfloat16_or_with_small_layers_keeps_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    model = make_tiny_model(tmp_path / "base")
    use_onednn(model)  # all layers are smaller than MIN_WEIGHTS
    monkeypatch.setattr(onednn, "MIN_WEIGHTS", 1)
    use_onednn(model.bfloat16())
    assert not any(isinstance(module, OneDNNLinear) for module in model.modules())
