import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import REPO
from tests.unit.trainer.learning_fixtures import VOCABULARY, lay, make_rows
from tidegate.config import TrainerSettings
from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.losses.built_in import make_loss
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.policy.head import token_logprobs

CAP = 2.0
DEFAULT: Loss = make_loss(TrainerSettings(loss={"name": "truncated_is", "importance_cap": CAP}))


def make_case(seed: int = 0) -> tuple[list[TrainingSequence], Microbatch, torch.Tensor]:
    """Rows, their one microbatch, and logits for its trained tokens; ratios on both sides of the cap."""
    rows = make_rows(5, seed)
    (batch,) = lay(rows, 10_000)
    generator = torch.Generator().manual_seed(seed)
    logits_nv = torch.randn(len(batch.at_n), VOCABULARY, generator=generator, dtype=torch.float64) * 2
    return rows, batch, logits_nv.requires_grad_()


def plain_loss(logits: list[list[float]], batch: Microbatch, weights: list[float]) -> float:
    """The formula, a token at a time, in plain floats; `weights` are the constants sg[min(π/μ, C)]."""
    total = 0.0
    for n, row in enumerate(logits):
        temperature = float(batch.temperatures_n[n])
        exponents = [value / temperature for value in row]
        logprob = exponents[int(batch.targets_n[n])] - math.log(sum(math.exp(one) for one in exponents))
        total -= weights[n] * float(batch.advantages_n[n]) * logprob
    return total / len(logits)


def plain_weights(logits: list[list[float]], batch: Microbatch) -> list[float]:
    found = []
    for n, row in enumerate(logits):
        exponents = [math.exp(value / float(batch.temperatures_n[n])) for value in row]
        probability = exponents[int(batch.targets_n[n])] / sum(exponents)
        found.append(min(probability / math.exp(float(batch.logprobs_n[n])), CAP))
    return found


def loss_of(logits_nv: torch.Tensor, batch: Microbatch, rows: list[TrainingSequence]) -> torch.Tensor:
    # In float64, which token_logprobs would round: the comparison is with a formula, not with a model.
    logprobs_nv = torch.log_softmax(logits_nv / batch.temperatures_n[:, None], dim=-1)
    logprobs_n = logprobs_nv.gather(1, batch.targets_n[:, None]).squeeze(1)
    return share(DEFAULT, logprobs_n, batch, rows)


def share(
    loss: Loss, logprobs_n: torch.Tensor, batch: Microbatch, rows: list[TrainingSequence]
) -> torch.Tensor:
    return loss(logprobs_n, batch, loss.aggregation(rows)[1])[0]


def test_loss_and_gradient_are_the_formulas():
    rows, batch, logits_nv = make_case()
    loss = loss_of(logits_nv, batch, rows)
    loss.backward()
    logits = logits_nv.detach().tolist()
    weights = plain_weights(logits, batch)
    assert any(weight == CAP for weight in weights), "no ratio was cut, so the case proves too little"
    assert any(weight < CAP for weight in weights)
    assert loss.item() == pytest.approx(plain_loss(logits, batch, weights), rel=1e-6)
    step = 1e-6
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, v = int(rng.integers(len(logits))), int(rng.integers(VOCABULARY))
        kept = logits[n][v]
        logits[n][v] = kept + step
        above = plain_loss(logits, batch, weights)
        logits[n][v] = kept - step
        below = plain_loss(logits, batch, weights)
        logits[n][v] = kept
        assert float(logits_nv.grad[n, v]) == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_on_policy_the_gradient_is_reinforces():
    rows, batch, logits_nv = make_case()
    logprobs_n, *_ = token_logprobs(logits_nv, batch.targets_n, batch.temperatures_n)
    batch.logprobs_n = logprobs_n.detach()
    share(DEFAULT, logprobs_n, batch, rows).backward()
    found, logits_nv.grad = logits_nv.grad, None
    logprobs_n, *_ = token_logprobs(logits_nv, batch.targets_n, batch.temperatures_n)
    (-(batch.advantages_n * logprobs_n).mean()).backward()
    torch.testing.assert_close(found, logits_nv.grad)


def test_a_token_above_the_cap_still_has_a_gradient():
    """Unlike under a clipped surrogate, which forgets it."""
    rows, batch, logits_nv = make_case()
    batch.logprobs_n = torch.full_like(batch.logprobs_n, -50.0)
    loss_of(logits_nv, batch, rows).backward()
    assert (logits_nv.grad.abs().sum(dim=1) > 0).all()


def test_the_denominator_is_the_whole_batchs():
    rows = make_rows(9)
    trained = sum(row.trained for row in rows)
    assert DEFAULT.aggregation(rows) == ([1.0] * 9, trained)
    parts = []
    for batch in lay(rows, 64):
        logprobs_n = torch.linspace(-3, -1, len(batch.at_n))
        ratio_n = (logprobs_n - batch.logprobs_n).exp().clamp(max=CAP)
        parts.append((ratio_n * batch.advantages_n * logprobs_n).sum())
        assert DEFAULT(logprobs_n, batch, trained)[0].item() == pytest.approx(-float(parts[-1]) / trained)
    assert len(parts) > 1


def test_logprobs_and_entropy_are_of_the_tempered_distribution():
    logits_nv = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)], [5.0, 5.0]])
    logprobs_n, entropy_n, _ = token_logprobs(
        logits_nv, torch.tensor([1, 1, 0]), torch.tensor([1.0, 0.5, 1.0])
    )
    torch.testing.assert_close(logprobs_n.exp(), torch.tensor([0.75, 0.9, 0.5]))
    expected = [-sum(p * math.log(p) for p in pair) for pair in ((0.25, 0.75), (0.1, 0.9), (0.5, 0.5))]
    torch.testing.assert_close(entropy_n, torch.tensor(expected))


def test_the_custom_loss_of_the_page_trains_as_it_stands(tmp_path: Path) -> None:
    page = (REPO / "docs" / "losses.md").read_text()
    blocks = re.findall(r"```(python|toml)\n(.*?)```", page, re.DOTALL)
    code, section = ([text for kind, text in blocks if kind == wanted] for wanted in ("python", "toml"))
    assert len(code) == 1
    (tmp_path / "my_loss.py").write_text(code[0])
    (settings,) = (tomllib.loads(text)["trainer"]["loss"] for text in section if "my_loss" in text)
    loss = make_loss(TrainerSettings(loss={**settings, "use": f"{tmp_path}/{settings['use']}"}))
    _, batch, logits_nv = make_case()
    logprobs_n, *_ = token_logprobs(logits_nv, batch.targets_n, batch.temperatures_n)
    value, lowered_n = loss(logprobs_n, batch, float(len(batch.at_n)))
    distance = (logprobs_n - batch.logprobs_n).detach().double()
    weight = torch.exp(distance) * torch.exp(-((distance / settings["options"]["width"]) ** 2))
    assert value.item() == pytest.approx(-(weight * batch.advantages_n * logprobs_n).mean().item(), rel=1e-4)
    assert lowered_n.tolist() == [abs(one) > 0.3 for one in distance.tolist()]
    value.backward()
    assert logits_nv.grad is not None
    assert torch.isfinite(logits_nv.grad).all()
