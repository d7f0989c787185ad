import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM

import tidegate.trainer.policy.forward as forward_module
from tests.unit.trainer.learning_fixtures import (
    VOCABULARY,
    make_group,
    make_model,
    make_rows,
    make_trajectory,
    make_turn,
)
from tidegate.config import TrainerSettings
from tidegate.errors import CheckpointError, StartError, TrainingError
from tidegate.trainer.batch.credit import centred, group_deviation, scaled
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.rows import TrainingSequence, rows_of
from tidegate.trainer.policy.optimizer import suitable_rate
from tidegate.trainer.policy.policy import Policy
from tidegate.types import Trajectory

UNCLIPPED = 1e9
TRUNCATED = {"name": "truncated_is", "importance_cap": 2.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def load(base: Path, **settings: object) -> Policy:
    return Policy.load(base, TrainerSettings(**{"max_grad_norm": UNCLIPPED, **settings}))


def plain_logprobs(model: torch.nn.Module, row: TrainingSequence) -> torch.Tensor:
    """log π of the trained tokens by the whole model on one unpadded row, read off the full logits."""
    logits_tv = model(input_ids=torch.tensor(row.ids[None].astype(np.int64))).logits[0]
    at = np.flatnonzero(row.mask)
    logits_nv = logits_tv[at - 1] / torch.tensor(row.temperature[at])[:, None]
    return torch.log_softmax(logits_nv, dim=-1)[range(len(at)), row.ids[at].astype(np.int64)]


def plain_gradients(
    model: torch.nn.Module, rows: list[TrainingSequence], cap: float
) -> dict[str, torch.Tensor]:
    """Of the default loss, one row at a time."""
    model.zero_grad()
    for row in rows:
        logprobs_n = plain_logprobs(model, row)
        ratio_n = (logprobs_n.detach() - torch.tensor(row.logprobs[row.mask])).exp().clamp(max=cap)
        (
            -(ratio_n * torch.tensor(row.advantages[row.mask]) * logprobs_n).sum()
            / sum(one.trained for one in rows)
        ).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def distance(policy: Policy, expected: dict[str, torch.Tensor]) -> float:
    """Of the gradients to those expected, relative to these: ‖g − e‖ ÷ ‖e‖ over all parameters."""
    apart = [(one.grad - expected[name]).norm() for name, one in policy.model.named_parameters()]
    return float(torch.stack(apart).norm() / torch.stack([one.norm() for one in expected.values()]).norm())


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in policy.model.named_parameters()}


def unchanged(policy: Policy, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one, before[name]) for name, one in policy.model.named_parameters())


def make_batch() -> list[TrainingSequence]:
    """Three groups of a prompt each and rows of their own: with prefixes of two lengths, and without."""
    rng = np.random.default_rng(0)
    groups = [make_group(rng, size=4, prompt=prompt, group=f"g{prompt}") for prompt in (40, 25, 30)]
    return [*make_rows(4), *(row for group in groups for row in group)]


@pytest.mark.parametrize("microbatch_tokens", [64, 200, 8192])
def test_gradients_equal_one_row_at_a_time(base, microbatch_tokens):
    rows = make_batch()
    expected = plain_gradients(load(base).model, rows, cap=2.0)
    policy = load(base, microbatch_tokens=microbatch_tokens, loss=TRUNCATED)
    assert policy._forward.shares
    laid = prefix_batches(rows, microbatch_tokens)
    assert [bool(bundle.prefixes) for bundle in laid][:2] == [False, True]
    metrics = policy.update(rows, version=3)
    assert distance(policy, expected) <= 1e-6
    norm = torch.stack([one.norm() for one in expected.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_logits_in_pieces_give_the_same_gradients(base, monkeypatch):
    rows = make_rows(6)
    expected = plain_gradients(load(base).model, rows, cap=2.0)
    monkeypatch.setattr(forward_module, "LOGITS_AT_ONCE", 7 * VOCABULARY)
    policy = load(base, loss=TRUNCATED)
    policy.update(rows, version=3)
    assert distance(policy, expected) <= 1e-6


def test_logprobs_equal_the_whole_models(base):
    rows = make_batch()
    policy = load(base, microbatch_tokens=100)
    for row, found in zip(rows, policy.logprobs(rows), strict=True):
        assert (found.shape, found.dtype) == (row.ids.shape, np.float32)
        np.testing.assert_allclose(found[row.mask], plain_logprobs(policy.model, row).detach(), atol=2e-5)
        assert not found[~row.mask].any()


def test_a_model_that_scales_its_logits_is_asked_for_them_whole(tmp_path):
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=3.0, initializer_range=0.3,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    policy = load(tmp_path)
    assert policy._forward._head is None
    assert not policy._forward.shares
    rows = make_rows(3)
    for row, found in zip(rows, policy.logprobs(rows), strict=True):
        np.testing.assert_allclose(found[row.mask], plain_logprobs(policy.model, row).detach(), atol=2e-5)


def test_on_policy_there_is_no_mismatch(base):
    policy = load(base)
    rows = make_rows(8)
    for row, logprobs in zip(rows, policy.logprobs(rows), strict=True):
        row.logprobs = logprobs
    metrics = policy.update(rows, version=3)
    assert metrics["logprob_max_error"] < 1e-5
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-8)
    assert metrics["lag_kl"] == pytest.approx(0, abs=1e-8)
    assert metrics["ess"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert 0 < metrics["entropy"] < math.log(VOCABULARY)


def test_metrics_of_a_step(base):
    rows = make_rows(7)
    metrics = load(base, learning_rate=0.01).update(rows, version=3)
    assert metrics["tokens/trained"] == sum(row.trained for row in rows)
    assert metrics["tokens/computed"] == sum(row.inputs for row in rows)  # these share nothing
    assert 0 <= metrics["padding_ratio"] < 0.5
    assert (metrics["skipped"], metrics["learning_rate"]) == (0, 0.01)
    assert metrics["time/update"] > 0
    assert all(isinstance(value, float) for value in metrics.values())


def test_gradients_are_clipped(base):
    """Adam knows no scale, so what tells is the norm of the gradients that it was given."""
    policy = load(base, max_grad_norm=0.01)
    metrics = policy.update(make_rows(4), version=3)
    norms = torch.stack([one.grad.norm() for one in policy.model.parameters()])
    assert metrics["grad_norm"] > 0.02
    assert float(norms.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_resumed_optimiser_has_the_settings_of_now(base, tmp_path):
    before, now = load(base, beta1=0.9, weight_decay=0.1), load(base, beta1=0.5, weight_decay=0.2)
    before.update(make_rows(4), version=3)
    before.save_state(tmp_path / "trainer.pt")
    now.load_state_from(tmp_path / "trainer.pt")
    assert [group["betas"] for group in now._optimizer.param_groups] == [(0.5, 0.999)] * 2
    assert {group["weight_decay"] for group in now._optimizer.param_groups} == {0.2, 0.0}
    assert len(now._optimizer.state) == len(before._optimizer.state)


def test_learning_rate_zero_changes_nothing(base):
    policy = load(base, learning_rate=0.0, weight_decay=0.1)
    before = weights_of(policy)
    policy.update(make_rows(4), version=3)
    assert unchanged(policy, before)


@pytest.mark.parametrize(
    ("parameters", "lora", "rate"),
    [
        (900_000, False, 3e-4),
        (135_000_000, False, 6e-6),
        (8_000_000_000, False, 1e-6),
        (8_000_000_000, True, 1e-5),
    ],
)
def test_the_default_rate_suits_the_size_of_the_model(parameters: int, lora: bool, rate: float) -> None:
    assert suitable_rate(parameters, lora=lora) == rate


def test_the_learning_rate_warms_up_and_stays(base):
    policy = load(base, learning_rate=0.04, warmup_steps=3)
    rows = make_rows(2)
    rates = [policy.update(rows, version=3)["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.04, 0.04])


def test_a_linear_schedule_falls_to_a_tenth_at_the_last_step(base):
    policy = load(base, learning_rate=0.1, schedule="linear", steps=4)
    rows = make_rows(2)
    rates = [policy.update(rows, version=3)["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.1, 0.07, 0.04, 0.01, 0.01])


def test_the_learning_rate_falls_with_the_effective_sample_size(base):
    """VCPO's rule, by hand: rate · √ESS of the products of π/μ, and the step that such a rate gives."""
    policy = load(base, learning_rate=0.1, ess_scaling=True)
    rows = make_rows(4)
    gaps = [(own - row.logprobs)[row.mask] for own, row in zip(policy.logprobs(rows), rows, strict=True)]
    weights = np.exp([gap.sum(dtype=np.float64).clip(-20, 20) for gap in gaps])
    expected = 0.1 * (weights.sum() ** 2 / (4 * (weights**2).sum())) ** 0.5
    assert expected < 0.09
    rate = policy.update(rows, version=3)["learning_rate"]
    assert rate == pytest.approx(expected, rel=1e-4)
    plain = load(base, learning_rate=rate)
    plain.update(rows, version=3)
    assert unchanged(plain, weights_of(policy))


def test_weight_decay_spares_vectors(base):
    policy = load(base, weight_decay=0.5, learning_rate=0.1)
    rows = make_rows(2)
    for row in rows:
        row.advantages[:] = 0.0
    before = weights_of(policy)
    policy.update(rows, version=3)
    for name, one in policy.model.named_parameters():
        torch.testing.assert_close(one.detach(), before[name] * (0.95 if one.ndim >= 2 else 1.0))


@pytest.mark.parametrize("poison", ["advantages", "logprobs"])
def test_a_loss_that_is_not_finite_skips_the_step_and_names_the_groups(base, poison):
    policy = load(base, microbatch_tokens=64)
    # Seven times the length: the poisoned row has a microbatch to itself.
    rows = [*make_rows(3, longest=9), *make_rows(1, seed=5, shortest=63, longest=63)]
    rows[-1].group_id = "poisoned"
    setattr(rows[-1], poison, getattr(rows[-1], poison) * np.nan)
    before, state = weights_of(policy), policy._state.read(0)
    metrics = policy.update(rows, version=3)
    assert metrics["skipped"] == 1
    assert policy.non_finite == ["poisoned"]
    assert unchanged(policy, before)
    assert policy.steps == 0
    assert policy._state.read(0)["optimizer"] == state["optimizer"]
    assert policy.update(rows[:-1], version=3)["skipped"] == 0
    assert policy.non_finite == []
    assert not unchanged(policy, before)
    assert all(torch.isfinite(one).all() for one in policy.model.parameters())


def test_a_gradient_that_is_not_finite_skips_the_step_too(base):
    policy = load(base)
    before = weights_of(policy)
    hook = next(policy.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    metrics = policy.update(make_rows(3), version=3)
    assert (metrics["skipped"], math.isfinite(metrics["loss"])) == (1, True)
    assert policy.non_finite == ["g0", "g1", "g2"]
    assert unchanged(policy, before)
    hook.remove()
    assert policy.update(make_rows(3), version=3)["skipped"] == 0


def test_a_batch_without_trained_tokens_is_refused(base):
    rows = make_rows(2)
    for row in rows:
        row.mask[:] = False
    with pytest.raises(TrainingError, match="no trainable token"):
        load(base).update(rows, version=0)


def test_saved_weights_are_a_whole_model(base, tmp_path):
    policy = load(base, learning_rate=0.05)
    rows = make_rows(4)
    policy.update(rows, version=3)
    saved = policy.save_weights(tmp_path / "weights" / "v1")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v1"]
    model = AutoModelForCausalLM.from_pretrained(saved)
    for name, one in model.named_parameters():
        assert torch.equal(one, dict(policy.model.named_parameters())[name])
    tokenizer = AutoTokenizer.from_pretrained(saved)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "w3 w5"}])
    assert tokenizer.decode(prompt["input_ids"]) == "w3 w5"
    assert json.loads((saved / "config.json").read_text())["vocab_size"] == VOCABULARY
    assert (saved / "generation_config.json").exists()


def test_saving_again_replaces_what_was_there(base, tmp_path):
    policy = load(base, learning_rate=0.05)
    target = policy.save_weights(tmp_path / "v1")
    (target / "stray").touch()
    policy.update(make_rows(4), version=3)
    policy.save_weights(target, durable=True)
    assert not (target / "stray").exists()
    again = load(target)
    assert unchanged(policy, weights_of(again))


def test_the_tokenizer_outlives_the_directory_it_came_from(base, tmp_path):
    first = load(base).save_weights(tmp_path / "first")
    policy = load(first)
    for path in first.iterdir():
        path.unlink()
    first.rmdir()
    AutoTokenizer.from_pretrained(policy.save_weights(tmp_path / "second"))


def test_a_save_that_fails_leaves_nothing_half_written(base, tmp_path, monkeypatch):
    policy = load(base)
    target = policy.save_weights(tmp_path / "v1")

    def fail(directory: Path, **_: object) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(policy.model, "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        policy.save_weights(target)
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    assert unchanged(policy, weights_of(load(target)))


def test_what_is_no_model_is_refused(base, tmp_path):
    with pytest.raises(StartError, match=r"nowhere: no model found"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(StartError, match="cannot load a causal language model"):
        load(tmp_path)
    base_config = (base / "config.json").read_text()
    (tmp_path / "config.json").write_text(base_config)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=r"these weights are missing: model.norm.weight"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="does not hold this run's model"):
        load(base).load_weights(tmp_path)


def sample(policy: Policy, prompt: list[int], length: int, episodes: int, seed: int) -> np.ndarray:
    """Sampled from the model itself by plain torch, [episodes, length] ids and their logprobs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(prompt).repeat(episodes, 1)
    logprobs = []
    with torch.no_grad():
        for _ in range(length):
            logprobs_bv = torch.log_softmax(policy.model(input_ids=ids).logits[:, -1], dim=-1)
            token = torch.multinomial(logprobs_bv.exp(), 1, generator=generator)
            logprobs.append(logprobs_bv.gather(1, token))
            ids = torch.cat([ids, token], dim=1)
    return np.stack([ids[:, len(prompt) :].numpy(), torch.cat(logprobs, dim=1).numpy()], axis=-1)


def episode(prompt: list[int], sampled: np.ndarray, version: int) -> Trajectory:
    turn = make_turn(0, None, prompt, sampled[:, 0].astype(int).tolist(), version=version)
    turn.logprobs = sampled[:, 1].astype(np.float32)
    return make_trajectory([turn])


def test_a_policy_learns_a_bandit(base):
    """Reward is the share of even tokens: from about a half to nearly all, through the whole path."""
    policy = load(base, learning_rate=3e-3, max_grad_norm=1.0)
    rewards = []
    for version in range(40):
        rows = []
        for group, prompt in enumerate(([1, 2], [3], [4, 5, 6])):
            sampled = sample(policy, prompt, length=4, episodes=8, seed=1000 * version + group)
            reward = (sampled[:, :, 0] % 2 == 0).mean(axis=1)
            rewards.append(reward.mean())
            apart = centred(reward[:, None].astype(np.float64))
            advantages = scaled(apart, group_deviation(apart))[:, 0]
            for one, advantage in zip(sampled, advantages, strict=True):
                rows += rows_of(episode(prompt, one, version), float(advantage))
        metrics = policy.update(rows, version)
        assert metrics["logprob_max_error"] < 1e-4
    assert np.mean(rewards[:6]) < 0.7
    assert np.mean(rewards[-6:]) > 0.9
