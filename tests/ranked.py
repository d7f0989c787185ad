"""One rank of a policy trained with plain SGD: `python -m tests.ranked DIRECTORY RANK`.

Reads plan.pickle; rank 0 writes found.pt.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tidegate.trainer.distributed.rank_main import RankInit
from tidegate.trainer.policy.policy import Policy


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def train(policy: Policy, batches: list[Any]) -> dict[str, Any]:
    """Metrics of the steps, gradients of the first, parameters before and after, a loss of the last, and the
    number of additions of the replicas' gradients."""
    policy._optimizer = torch.optim.SGD(policy.model.parameters(), lr=policy.settings.learning_rate)
    start = {name: whole(one) for name, one in policy.model.named_parameters()}
    metrics, gradients = [], {}
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for rows in batches:
            metrics.append(policy.update(rows, version=3))
            gradients = gradients or {
                name: whole(one.grad) for name, one in policy.model.named_parameters() if one.grad is not None
            }
    return {
        "additions": sum("group" in call.kwargs for call in all_reduce.call_args_list),
        "start": start,
        "metrics": metrics,
        "gradients": gradients,
        "parameters": {name: whole(one) for name, one in policy.model.named_parameters()},
        "validation_loss": policy.validation_loss(batches[0]),
    }


def main(directory: Path, rank: int) -> None:
    init, variants, batches = pickle.loads((directory / "plan.pickle").read_bytes())
    assert isinstance(init, RankInit)
    policy = init.join(rank, dist.FileStore(str(directory / "store"), init.settings.ranks))
    found = {}
    for name, changed in variants.items():
        settings = type(init.settings)(**{**init.settings.model_dump(), **changed})
        found[name] = train(Policy.load(init.model, settings, ranks=policy.ranks), batches)
    if rank == 0:
        torch.save(found, directory / "found.pt")
    dist.barrier()  # a rank that exits first would close the others' connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
