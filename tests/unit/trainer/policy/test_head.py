"""Log-probabilities in pieces equal those of whole logits, and so do their gradients."""

from __future__ import annotations

import pytest
import torch

from tidegate.trainer.policy.head import TokenLogprobs, logprobs_in_pieces, narrowed, token_logprobs


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


KEPT = torch.tensor([[4, 0, 2], [1, 6, -1], [-1, -1, -1], [3, -1, -1]])
"""Kept ids of four tokens of a vocabulary of seven; the third was drawn from all."""


def replayed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(len(logits))
    return narrowed(token_logprobs(logits, targets, ones, KEPT.clamp(min=0)), KEPT).logprobs_n


def plain(logits: torch.Tensor) -> torch.Tensor:
    """log π' of every id: the softmax of the logits of the kept ids alone."""
    excluded = torch.ones_like(logits, dtype=torch.bool)
    for row, kept in enumerate(KEPT.tolist()):
        excluded[row, [one for one in kept if one >= 0] or list(range(7))] = False
    return torch.log_softmax(logits.masked_fill(excluded, -torch.inf), dim=1)


def test_replayed_logprobs_are_the_softmax_of_the_kept_logits() -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 7)).requires_grad_()
    targets, upstream = torch.tensor([0, 6, 5, 3]), torch.randn(4)
    expected, found = plain(logits).gather(1, targets[:, None])[:, 0], replayed(logits, targets)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert found[3] == 0, "the only kept id is certain"
    gradients = [torch.autograd.grad((one * upstream).sum(), logits)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


def test_the_mean_score_under_the_renormalised_sampler_is_zero() -> None:
    """By enumeration; that of the whole policy's score, which a trainer without replay computes, is not."""
    torch.manual_seed(1)
    logits = torch.randn(4, 7).requires_grad_()
    probs = plain(logits).detach().exp()
    means = {"with": torch.zeros_like(logits), "without": torch.zeros_like(logits)}
    for token in range(7):
        targets = torch.full((4,), token)
        whole = token_logprobs(logits, targets, torch.ones(4)).logprobs_n
        for name, logprobs in (("with", replayed(logits, targets)), ("without", whole)):
            # An id that was not kept has probability 0.
            means[name] += torch.autograd.grad((probs[:, token] * logprobs).sum(), logits)[0]
    assert means["with"].abs().max() < 1e-6
    assert means["without"][[0, 1, 3]].abs().amax(dim=1).min() > 0.1
    assert means["without"][2].abs().max() < 1e-6


@pytest.mark.parametrize("listed", [2, 7])
def test_listed_ids_are_renormalised_too_and_excluded_ones_have_no_probability(listed: int) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 7)
    sampler = plain(torch.randn(4, 7)).clamp(min=-9999.0).topk(listed)
    ids = torch.cat([sampler.indices, KEPT.clamp(min=0)], dim=1)
    scored = token_logprobs(logits, torch.tensor([0, 6, 5, 3]), torch.ones(4), ids)
    found = narrowed(scored, KEPT, sampler.values).top_nk
    assert found is not None
    torch.testing.assert_close(found, plain(logits).gather(1, sampler.indices).clamp(min=-60.0))
    assert isinstance(scored, TokenLogprobs)
