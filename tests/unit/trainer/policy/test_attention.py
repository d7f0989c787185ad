"""Attention on a GPU has neither a flag nor a mask that torch's kernels refuse or convert in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import CausalBias

from tests.tiny import make_tiny_model
from tests.unit.trainer.learning_fixtures import VOCABULARY, make_group, make_rows
from tidegate.config import TrainerSettings
from tidegate.trainer.checkpoint.huggingface import read_model
from tidegate.trainer.policy.attention import NAME, use_gpu_kernels
from tidegate.trainer.policy.forward import Forward
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.policy.ranks import Ranks


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("bfloat16", "grouped"), [(False, False), (True, True)])
def test_heads_are_grouped_in_bfloat16_only_and_without_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, bfloat16: bool, grouped: bool
) -> None:
    model = make_tiny_model(tmp_path / "base", hidden=32, family=family)
    plain = torch.nn.functional.scaled_dot_product_attention
    calls: list[dict[str, Any]] = []

    def recorded(*tensors: Any, **options: Any) -> Any:
        calls.append(options)
        return plain(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)

    def logits() -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            return model(input_ids=torch.arange(12)[None].expand(2, 12), use_cache=False).logits

    expected = logits()
    assert {call.get("enable_gqa") for call in calls} == {True}, "as transformers does it"
    calls.clear()
    use_gpu_kernels(model)
    assert torch.allclose(logits(), expected, atol=1e-5)
    assert [bool(call.get("enable_gqa")) for call in calls] == [grouped] * 2
    assert all(call["attn_mask"] is None and call["is_causal"] for call in calls)


def test_a_policy_on_a_gpu_uses_it(tmp_path: Path) -> None:
    for device, name in (("cpu", "sdpa"), ("cuda", NAME)):
        model = make_tiny_model(tmp_path / device, hidden=32)
        settings = TrainerSettings(device=device)
        Forward(model, settings, Ranks(settings))
        assert model.config._attn_implementation == name


@pytest.mark.parametrize(
    ("family", "dtype", "rank"), [("qwen3", "float32", 0), ("llama", "float32", 0), ("qwen3", "bfloat16", 4)]
)
def test_rows_continue_a_shared_prefix_without_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, rank: int
) -> None:
    """torch turns a boolean mask into numbers in every layer, which keeps them."""
    make_tiny_model(tmp_path / "base", VOCABULARY, hidden=32, family=family)
    rng, masks = np.random.default_rng(0), []
    rows = [*make_group(rng, size=4, prompt=30), *make_group(rng, size=3, prompt=41), *make_rows(2)]
    own = torch.nn.functional.scaled_dot_product_attention

    def gradients(device: str) -> list[torch.Tensor]:
        settings = TrainerSettings(
            device=device, compute_dtype=dtype, lora={"rank": rank}, loss={"name": "dapo"}
        )
        torch.manual_seed(0)  # an adapter is drawn
        policy = Policy(read_model(tmp_path / "base"), tmp_path / "base", settings)
        assert policy._forward.shares
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
        policy.backward(rows, version=3)
        monkeypatch.undo()
        return [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]

    def recorded(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        masks.append(type(attn_mask))
        with monkeypatch.context() as inner:  # the form of a CPU has a mask
            inner.setattr(torch.nn.functional, "scaled_dot_product_attention", own)
            return own(query, key, value, attn_mask, **options)

    expected = gradients("cpu")
    assert set(masks) == {type(None), torch.Tensor}
    masks.clear()
    found = gradients("cuda")
    assert set(masks) == {type(None), CausalBias}
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        error = 1e-5 if dtype == "float32" else 0.01
        assert float((one - other).abs().max()) <= error * float(other.abs().max())
