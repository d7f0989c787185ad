"""Routing replay: the trainer computes tokens with the experts that were recorded for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_model
from tests.unit.trainer.learning_fixtures import VOCABULARY, make_group, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import StartError, TrainingError
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.policy.routing import normalises
from tidegate.weights.internals import routers

LAYERS, K, EXPERTS = 2, 2, 4
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    make_tiny_model(path, VOCABULARY, hidden=32, family="qwen3_moe")
    return path


@contextmanager
def routed_by(model: Any, choose: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Routers take the experts that `choose` returns for a layer's own ones; their weights are shares of all
    experts' odds."""

    def hook(layer: int, routed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, own = routed
        ids = choose(layer, own)
        odds = logits.float().exp()
        return logits, (odds.gather(1, ids) / odds.sum(1, keepdim=True)).to(weights.dtype), ids

    handles = [
        one.register_forward_hook(lambda _, __, routed, layer=layer: hook(layer, routed))
        for layer, one in routers(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(base: Path, rows: list[TrainingSequence], flipped: float, seed: int = 0) -> None:
    """Record what an engine would: experts, a part of them other than the router's, and logprobs.

    Rows that begin with the same tokens have the same experts there.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for row in rows:
        found = torch.zeros(LAYERS, len(row.ids), K, dtype=torch.long)

        def choose(
            layer: int,
            own: torch.Tensor,
            row: TrainingSequence = row,
            found: torch.Tensor = found,
        ) -> torch.Tensor:
            for at, token in enumerate(row.ids.tolist()):
                draws = np.random.default_rng([seed, layer, at, token])
                drawn = torch.from_numpy(draws.permutation(EXPERTS)[:K])
                found[layer, at] = drawn if draws.random() < flipped else own[at]
            return found[layer]

        with torch.no_grad(), routed_by(model, choose):
            logits = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits / torch.from_numpy(row.temperature[1:, None]), -1)
        own = logprobs.gather(1, torch.from_numpy(row.ids[1:, None].astype(np.int64)))[:, 0].numpy()
        row.logprobs[1:] = np.where(row.mask[1:], own, 0)
        row.experts = found.transpose(0, 1).reshape(len(row.ids), -1).numpy().astype(np.uint16)
        row.experts[-1] = 0  # never read


def rows_that_share() -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    groups = [make_group(rng, size=3, prompt=prompt, group=f"g{prompt}") for prompt in (40, 25)]
    return [*make_rows(4), *(row for group in groups for row in group)]


def policy(base: Path, **settings: Any) -> Policy:
    return Policy.load(base, TrainerSettings(microbatch_tokens=200, routing_replay=True, **settings))


def worst_error(one: Policy, rows: list[TrainingSequence]) -> float:
    found = one.logprobs(rows)
    return max(float(abs(a - row.logprobs).max()) for a, row in zip(found, rows, strict=True))


@pytest.mark.parametrize("flipped", [0.0, 0.1])
def test_logprobs_agree_with_the_engines_where_its_routers_chose_otherwise(
    base: Path, flipped: float
) -> None:
    rows = rows_that_share()
    record(base, rows, flipped)
    assert any(bundle.prefixes for bundle in prefix_batches(rows, 200)), (
        "a prefix is shared, with its experts"
    )
    assert worst_error(policy(base), rows) <= TOLERANCE
    plain = Policy.load(base, TrainerSettings(microbatch_tokens=200))
    if flipped:
        assert worst_error(plain, rows) > 10 * TOLERANCE
    else:
        assert worst_error(plain, rows) <= TOLERANCE


def gradients(base: Path, rows: list[TrainingSequence], **settings: Any) -> dict[str, torch.Tensor]:
    one = policy(base, **settings)
    one.update(rows, version=3)
    return {name: parameter.grad for name, parameter in one.model.named_parameters()}


def test_only_recorded_experts_and_the_routers_have_gradients(base: Path) -> None:
    rows = make_rows(6)
    record(base, rows, 0.0)
    for row in rows:
        assert row.experts is not None
        row.experts[:] = [3, 1, 0, 2]
    found = gradients(base, rows)
    experts = {name: grad for name, grad in found.items() if ".experts." in name}
    assert len(experts) == 2 * LAYERS
    for name, gradient in experts.items():
        used = {1, 3} if "layers.0" in name else {0, 2}
        assert {at for at in range(EXPERTS) if gradient[at].abs().sum() > 0} == used, name
    for name, gradient in found.items():
        if name.endswith("gate.weight"):
            assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_with_activation_checkpointing_are_the_same_bit_for_bit(base: Path, shared: bool) -> None:
    """Layers of one pass are computed again while those of another, with other experts, are in memory."""
    rows = rows_that_share() if shared else make_rows(12)
    record(base, rows, 0.3)
    plain = gradients(base, rows)
    again = gradients(base, rows, activation_checkpointing=True)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_gradients_of_shared_prefixes_are_those_of_rows_alone(base: Path) -> None:
    rows = rows_that_share()
    record(base, rows, 0.3)
    shared = gradients(base, rows)
    one = policy(base)
    one._forward.shares = False
    one.update(rows, version=3)
    for name, parameter in one.model.named_parameters():
        torch.testing.assert_close(shared[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_a_prefix_with_other_experts_is_not_shared(base: Path) -> None:
    """One prompt was computed by two engines, and their routers chose differently at its token 7."""
    rng = np.random.default_rng(0)
    rows = make_group(rng, size=4, prompt=60)
    record(base, rows, 0.0)
    (bundle,) = prefix_batches(rows, 1000)
    assert [batch.tokens for batch in bundle.prefixes] == [59]
    for row in rows[:2]:
        assert row.experts is not None
        row.experts[7] = (row.experts[7] + 1) % EXPERTS
    found = prefix_batches(rows, 1000)
    assert sum(batch.tokens for bundle in found for batch in bundle.prefixes) == 2 * 59


def test_a_working_copy_in_bfloat16_replays(base: Path) -> None:
    rows = make_rows(4)
    record(base, rows, 0.3)
    exact = policy(base).logprobs(rows)
    short = policy(base, compute_dtype="bfloat16").logprobs(rows)
    plain = Policy.load(base, TrainerSettings(compute_dtype="bfloat16")).logprobs(rows)
    off, off_plain = (
        max(float(abs(a - b).max()) for a, b in zip(exact, other, strict=True)) for other in (short, plain)
    )
    assert off < 0.2 < off_plain


def test_what_cannot_be_replayed_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="Qwen3ForCausalLM has no routers of experts"):
        policy(make_model(tmp_path / "dense"))
    model = AutoModelForCausalLM.from_pretrained(base)
    assert normalises(model) is False, "of this configuration"
    for router in routers(model).values():
        router.register_forward_hook(lambda _, __, routed: (routed[0], routed[0].sigmoid()[:, :K], routed[2]))
    with pytest.raises(StartError, match="do not weight the experts by a softmax"):
        normalises(model)
    rows = make_rows(2)
    one = policy(base)
    with pytest.raises(
        TrainingError, match="has no experts of its tokens: it was recorded without; its batch"
    ):
        one.update(rows, version=3)
    record(base, rows, 0.0)
    assert rows[0].experts is not None
    rows[0].experts[1, 1] = EXPERTS
    with pytest.raises(TrainingError, match="up to 4, where the trained model has 4 with ids below 4"):
        one.update(rows, version=3)
