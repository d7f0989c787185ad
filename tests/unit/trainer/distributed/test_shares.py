"""A rank is sent its own share of a batch and no other row; the shares' gradients add up to the batch's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.distributed.test_ranks import Told
from tests.unit.trainer.learning_fixtures import make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import TrainingError
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.distributed.fsdp import FSDPRanks
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.policy.ranks import Ranks

RANKS = 4


class SeparateRank(FSDPRanks):
    """A rank without a process group, with the whole model: sums are its own."""

    def __init__(
        self,
        settings: TrainerSettings,
        rank: int,
        call: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext(),
    ) -> None:
        Ranks.__init__(self, settings)
        self.rank, self.count, self._call = rank, settings.ranks, call

    read_model = Ranks.read_model
    agree = Ranks.agree
    outline = Ranks.outline
    shard_model = Ranks.shard_model
    gather = Ranks.gather
    sum = Ranks.sum
    collect = Ranks.collect


class Lead:
    """Rank 0 of four, the processes of the others, and their policies."""

    def __init__(self, base: Path, **more: Any) -> None:
        self.settings = TrainerSettings(ranks=RANKS, microbatch_tokens=800, **more)
        self.base = base
        self.processes = [Told(rank) for rank in range(1, RANKS)]
        call = RankProcesses(self.settings, self.processes).collective
        self.policy = Policy.load(base, self.settings, ranks=SeparateRank(self.settings, 0, call))

    def shares(self) -> list[Any]:
        """Shares that were sent."""
        calls: list[Any] = [message for process in self.processes for message in process.messages]
        return [share for _, (shares, *_), _ in calls for share in shares]

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """The gradients of each rank, after the calls that were sent to it."""
        policies = [self.policy]
        for process in self.processes:
            policy = Policy.load(self.base, self.settings, ranks=SeparateRank(self.settings, process.rank))
            for message in process.messages:
                method, arguments, options = pickle.loads(pickle.dumps(message))
                getattr(policy, method)(*arguments, **options)
            policies.append(policy)
        return [gradients(policy) for policy in policies]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def one_call(policy: Policy, rows: list[TrainingSequence]) -> None:
    policy.backward(rows, 3)


def two_calls(policy: Policy, rows: list[TrainingSequence]) -> None:
    policy.backward(rows[:30], 3)
    policy.backward(rows[30:], 3)


def validation(policy: Policy, rows: list[TrainingSequence]) -> None:
    policy.validation_loss(rows)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (one_call, {}),
        (one_call, {"minibatches": 3, "loss": {"name": "decoupled_ppo"}}),
        (two_calls, {"minibatches": 2, "streaming": True}),
        (validation, {}),
    ],
)
def test_all_ranks_together_are_sent_one_batch(base: Path, method: Any, more: dict[str, Any]) -> None:
    rows = make_rows(64, shortest=200, longest=300)
    lead = Lead(base, **more)
    method(lead.policy, rows)
    sent = [sum(len(pickle.dumps(one)) for one in process.messages) for process in lead.processes]
    batch = len(pickle.dumps(rows))
    assert sum(sent) == pytest.approx(batch * (RANKS - 1) / RANKS, rel=0.1), "rank 0 keeps its own share"
    assert max(sent) < 1.25 * batch / RANKS
    names = [row.session_id for share in lead.shares() for row in share.rows]
    assert len(names) == len(set(names)) == pytest.approx(48, abs=3), "none twice"


@pytest.mark.parametrize("number", [3, 5, 21])
@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_gradients_of_the_shares_add_up_to_that_of_the_batch(base: Path, number: int, loss: str) -> None:
    """A rank without rows in a pass has a gradient of 0 for every parameter, as FSDP needs one."""
    rows = make_rows(number, seed=number, longest=300)
    more: dict[str, Any] = {"loss": {"name": loss}, "reference_model": base, "kl_coef": 0.1}
    lead = Lead(base, **more)
    lead.policy.backward(rows, 3)
    of_ranks = lead.gradients()
    alone = Policy.load(base, TrainerSettings(**more))
    alone.backward(rows, 3)
    whole = gradients(alone)
    assert all(of_rank.keys() == whole.keys() for of_rank in of_ranks)
    total = {name: torch.stack([of_rank[name] for of_rank in of_ranks]).sum(dim=0) for name in whole}
    gap = torch.stack([(total[name] - gradient).norm() for name, gradient in whole.items()]).norm()
    assert gap < 1e-5 * torch.stack([gradient.norm() for gradient in whole.values()]).norm()


def test_a_batch_that_cannot_be_trained_on_is_sent_to_no_rank(base: Path) -> None:
    """Each rank would find the fault in its own rows only, and the others would wait for it."""
    lead = Lead(base, teacher={"path": base})
    with pytest.raises(TrainingError, match="has no logprobs of the teacher"):
        lead.policy.backward(make_rows(8), 3)
    assert [process.messages for process in lead.processes] == [[]] * (RANKS - 1)
