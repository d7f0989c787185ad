"""The flag for grouped heads is left out where torch's kernels of a GPU refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_tiny_model
from tidegate.config import TrainerSettings
from tidegate.trainer.policy.attention import NAME, use_repeated_heads
from tidegate.trainer.policy.forward import Forward
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
    use_repeated_heads(model)
    assert torch.allclose(logits(), expected, atol=1e-5)
    assert [bool(call.get("enable_gqa")) for call in calls] == [grouped] * 2
    assert all(call["attn_mask"] is None and call["is_causal"] for call in calls)


def test_a_policy_on_a_gpu_repeats_the_heads(tmp_path: Path) -> None:
    for device, name in (("cpu", "sdpa"), ("cuda", NAME)):
        model = make_tiny_model(tmp_path / device, hidden=32)
        settings = TrainerSettings(device=device)
        Forward(model, settings, Ranks(settings))
        assert model.config._attn_implementation == name
