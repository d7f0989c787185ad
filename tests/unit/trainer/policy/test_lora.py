"""LoRA: the adapter is trained, and only the trainer handles it; engines get merged weights."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_model
from tests.unit.trainer.learning_fixtures import VOCABULARY, make_group, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import CheckpointError, StartError
from tidegate.plan.shape import read_shape
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.policy.policy import Policy

LORA = {"lora": {"rank": 4}, "learning_rate": 0.01}
STATE = {"ledger": 1, "version": 7}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def load(base: Path, seed: int = 0, **settings: object) -> Policy:
    return Policy.load(base, TrainerSettings(**{**LORA, **settings}), seed)


def rows_that_share(seed: int = 0) -> list[TrainingSequence]:
    rng = np.random.default_rng(seed)
    return [*make_rows(3, seed), *make_group(rng, size=4, prompt=40)]


def trained(base: Path, steps: int = 2, **settings: object) -> Policy:
    policy = load(base, **settings)
    for step in range(steps):
        policy.update(rows_that_share(step), version=step)
    return policy


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def test_it_begins_as_the_model_and_trains_nothing_else(base: Path) -> None:
    plain = Policy.load(base, TrainerSettings()).weights()
    assert apart(load(base).weights(), plain) == set()
    changed = apart(trained(base).weights(), plain)
    linear = {f"{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.rsplit(".", 2)[1] + ".weight" for name in changed} == linear
    assert len(changed) == 2 * len(linear)


def test_what_is_saved_is_the_policy_in_the_base_models_form(base: Path, tmp_path: Path) -> None:
    policy = trained(base)
    saved = policy.save_weights(tmp_path / "v1")
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    original = AutoModelForCausalLM.from_pretrained(base)
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in original.named_parameters()
    }
    assert (saved / "config.json").read_text() == (base / "config.json").read_text()
    assert apart(policy.weights(), {name: one.detach() for name, one in model.named_parameters()}) == set()
    ids = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids).logits, policy.model(ids).logits, atol=1e-4, rtol=1e-4)
    assert (model(ids).logits - original(ids).logits).abs().max() > 0.1
    plain = Policy.load(saved, TrainerSettings())
    for one, other in zip(policy.logprobs(rows_that_share()), plain.logprobs(rows_that_share()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_merging_is_pefts(base: Path) -> None:
    policy = trained(base)
    merged = policy.weights()
    for module in policy.model.modules():
        if hasattr(module, "get_delta_weight"):
            module.merge()
    for name, one in policy.model.named_parameters():
        if ".lora_" not in name:
            torch.testing.assert_close(merged[name.replace(".base_layer", "")], one)


def test_a_resumed_step_is_the_uninterrupted_one_bit_for_bit(base: Path, tmp_path: Path) -> None:
    policy = trained(base)
    checkpoints.save(tmp_path, 2, policy, STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    resumed = load(base, seed=99)
    assert apart(dict(resumed.model.state_dict()), dict(policy.model.state_dict()))
    checkpoints.load(found, resumed)
    for step in range(2, 4):
        one, other = (each.update(rows_that_share(step), version=step) for each in (policy, resumed))
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert apart(dict(resumed.model.state_dict()), dict(policy.model.state_dict())) == set()


def test_a_checkpoint_of_another_base_or_another_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, trained(base), STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    other = make_model(tmp_path / "other", seed=1)
    cases = [
        (other, {}, r"step_2 does not hold this run's model: .* set model.path and trainer.lora.alpha"),
        (base, {"lora": {"rank": 4, "alpha": 8.0}}, "lora.alpha"),
        (
            base,
            {"lora": {"rank": 2}},
            r"trainer.pt is not a trainer state of this model: .*\[4, 32\] instead of",
        ),
        (base, {"lora": {"rank": 4, "targets": ["q_proj"]}}, "tensor names differ: .*lora_A"),
        (base, {"lora": {"rank": 0}}, "lora.rank was switched on or off"),
    ]
    for model, settings, said in cases:
        with pytest.raises(CheckpointError, match=said):
            checkpoints.load(found, load(model, **settings))


@pytest.mark.parametrize("targets", [["o_proj"], ["v_proj", "down_proj"], []])
def test_shared_prefixes_and_layers_computed_again_give_the_same_gradients(
    base: Path, targets: list[str]
) -> None:
    """Also where nothing is trained before the first keys and values."""
    found = []
    for share, again in ((False, False), (True, False), (True, True)):
        policy = load(
            base, lora={"rank": 4, "targets": targets}, activation_checkpointing=again, max_grad_norm=1e9
        )
        policy._forward.shares &= share
        policy.update(make_group(np.random.default_rng(0), size=4, prompt=40), version=3)
        parameters = policy._adapter.parameters(policy.model)
        found.append(torch.cat([one.grad.flatten() for one in parameters.values()]))
    whole, shared, again = found
    assert float((shared - whole).norm() / whole.norm()) < 1e-6
    assert torch.equal(shared, again)


def test_a_batch_in_parts_gives_the_gradient_of_the_whole(base: Path) -> None:
    """By tokens and by minibatches as they come, with layers computed again."""
    parts: list[dict[str, object]] = [
        {"microbatch_tokens": 8192},
        {"microbatch_tokens": 64},
        {"microbatch_tokens": 64, "minibatches": 2, "streaming": True},
    ]
    found = []
    for settings in parts:
        policy = load(base, activation_checkpointing=True, max_grad_norm=1e9, **settings)
        policy.update(rows_that_share(), version=3)
        parameters = policy._adapter.parameters(policy.model)
        found.append(torch.cat([one.grad.flatten() for one in parameters.values()]))
    whole = found[0]
    assert [float((one - whole).norm() / whole.norm()) for one in found] == pytest.approx([0] * 3, abs=1e-6)


def test_passes_in_bfloat16(base: Path) -> None:
    exact, short = (trained(base, steps=1, compute_dtype=one) for one in ("float32", "bfloat16"))
    for name, one in short._adapter.parameters(short.model).items():
        other = exact._adapter.parameters(exact.model)[name]
        assert one.dtype == one.grad.dtype == torch.float32
        if float(other.grad.norm()):
            assert float((one.grad - other.grad).norm() / other.grad.norm()) < 0.05


def test_a_step_that_is_not_finite_is_skipped_and_named(base: Path) -> None:
    policy = trained(base)
    before = {name: one.clone() for name, one in policy.weights().items()}
    rows = rows_that_share()
    rows[1].group_id, rows[1].advantages[:] = "bad", math.nan
    assert policy.update(rows, version=3)["skipped"] == 1
    assert policy.non_finite == ["bad"]
    assert apart(policy.weights(), before) == set()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_porj"], "q_porj"),
        (["embed_tokens"], "no linear layer 'embed_tokens'; it has down_proj, gate_proj"),
        (["lm_head"], "lm_head shares its weight with another layer"),
    ],
)
def test_targets_that_cannot_be_merged_are_refused(base: Path, targets: list[str], said: str) -> None:
    with pytest.raises(StartError, match=f"lora.targets: .*{said}"):
        load(base, lora={"rank": 4, "targets": targets})


def test_an_untied_head_may_be_one(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, VOCABULARY, hidden=32, family="llama")
    policy = trained(tmp_path, lora={"rank": 4, "targets": ["lm_head", "q_proj"]})
    plain = Policy.load(policy.save_weights(tmp_path / "v1"), TrainerSettings())
    for one, other in zip(policy.logprobs(rows_that_share()), plain.logprobs(rows_that_share()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_what_is_missing_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(StartError, match=r"trainer.lora.rank needs peft .*extra 'lora'"):
        load(base)
    with pytest.raises(ValueError, match="targets has no effect without LoRA"):
        TrainerSettings(lora={"targets": ["q_proj"]})


@pytest.mark.parametrize(("family", "targets"), [("qwen3", []), ("qwen3", ["up_proj"]), ("qwen3_moe", [])])
def test_the_memory_plan_counts_the_parameters_of_the_adapter(
    tmp_path: Path, family: str, targets: list[str]
) -> None:
    make_tiny_model(tmp_path / "base", vocab=640, hidden=32, family=family)
    policy = load(tmp_path / "base", lora={"rank": 4, "targets": targets})
    number = sum(one.numel() for one in policy.model.parameters() if one.requires_grad)
    assert read_shape(tmp_path / "base").adapter(4, targets) == number > 0


def test_experts_of_one_tensor_get_no_adapter(tmp_path: Path) -> None:
    """peft would adapt them, under names and by products that are not those of a merged linear layer."""
    base = tmp_path / "base"
    make_tiny_model(base, vocab=640, hidden=32, family="qwen3_moe")
    plain = Policy.load(base, TrainerSettings()).weights()
    changed = apart(trained(base).weights(), plain)
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(StartError, match="no linear layer 'up_proj'; it has k_proj, "):
        load(base, lora={"rank": 4, "targets": ["q_proj", "up_proj"]})
