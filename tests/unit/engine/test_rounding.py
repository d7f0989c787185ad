"""Weights rounded for sampling: their values, what stays as it is, and rounding after an update."""

from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_model
from tidegate.engine.model.model import load_model
from tidegate.engine.model.rounding import GROUP, RoundedLinear, rounded, use_rounding
from tidegate.engine.options import EngineOptions


@pytest.mark.parametrize("levels", [127, 7, 2])
@pytest.mark.parametrize("inputs", [2 * GROUP, GROUP + 1])
def test_values_are_the_nearest_multiples_of_their_groups_scale(levels: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, inputs)
    weight[1] = 0
    found = rounded(weight, levels)
    size = GROUP if inputs % GROUP == 0 else inputs
    for before, after in zip(weight.view(-1, size), found.view(-1, size), strict=True):
        scale = before.abs().max() / levels
        assert (after - before).abs().max() <= scale / 2 + 1e-7
        assert len(after.unique()) <= 2 * levels + 1
        assert after.abs().max() == pytest.approx(float(before.abs().max()))


def test_a_model_samples_from_rounded_weights_also_after_an_update() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=GROUP, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model, plain = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    use_rounding(model, "int4")
    assert type(model.lm_head) is torch.nn.Linear
    ids = torch.arange(12)[None]
    for _ in range(2):
        with torch.inference_mode():
            for name, value in model.state_dict().items():
                value.copy_(plain.state_dict()[name])  # as the engine loads weights
            found = model(ids).logits
            for name, module in model.named_modules():
                if isinstance(module, RoundedLinear):
                    plain.get_parameter(f"{name}.weight").copy_(rounded(module.weight, 7))
            torch.testing.assert_close(found, plain(ids).logits)
        plain = LlamaForCausalLM(config).eval()


def test_an_engine_rounds_where_it_is_asked_to(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, 50)
    for quantize, rounds in (("int8", True), (None, False)):
        model = load_model(EngineOptions(tmp_path, quantize=quantize)).hf_model
        assert any(isinstance(module, RoundedLinear) for module in model.modules()) == rounds
