"""Log-probabilities of sampled tokens, as the engine computes them."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits_nv: Tensor, targets_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log π of the targets and the entropy of their distributions: float32 [n], detached float32 [n].

    The distribution is softmax(logits ÷ temperature), from which the engine samples and reports logprobs.
    """
    logprobs_nv = torch.log_softmax(logits_nv.float() / temperatures_n[:, None], dim=-1)
    with torch.no_grad():
        entropy_n = torch.special.entr(logprobs_nv.exp()).sum(dim=-1)
    return logprobs_nv.gather(1, targets_n[:, None]).squeeze(1), entropy_n
