"""Log-probabilities in pieces equal those of whole logits, and so do their gradients."""

from __future__ import annotations

import pytest
import torch

from tidegate.trainer.policy.head import logprobs_in_pieces, token_logprobs


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("others", [None, 4])
def test_pieces_equal_whole_logits(size: int, others: int | None) -> None:
    torch.manual_seed(0)
    tokens, width, vocabulary = 10, 8, 31
    targets, temperatures = torch.randint(vocabulary, (tokens,)), 0.5 + torch.rand(tokens)
    ids = None if others is None else torch.randint(vocabulary, (tokens, others))
    if ids is not None:
        ids[:, 0] = targets  # a teacher may find the sampled token likely
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width)
    upstream = torch.randn(tokens, 1 + (others or 0))
    results = []
    for in_pieces in (False, True):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if in_pieces:
            scored = logprobs_in_pieces(*inputs, torch.float32, size, targets, temperatures, ids)
        else:
            scored = token_logprobs(inputs[0] @ inputs[1].t(), targets, temperatures, ids)
        every = scored.logprobs_n[:, None]
        if scored.top_nk is not None:
            every = torch.cat([every, scored.top_nk], dim=1)
        assert not scored.entropy_n.requires_grad
        results.append(
            [every.detach(), scored.entropy_n, *torch.autograd.grad((every * upstream).sum(), inputs)]
        )
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
