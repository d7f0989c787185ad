"""Log-probabilities of tokens from hidden states, without the graph of the logits.

Logits of thousands of tokens and a large vocabulary take gigabytes. They are computed in pieces and twice, in
the forward and in the backward pass; one number a token, the logarithm of the normaliser, is kept between.
The gradient by the logits is written directly, (one-hot − softmax) · upstream, with few passes over them.
docs/scaling.md, *Kernels for logprobs*, has the kernels of libraries and their limits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tidegate.weights.float_logits import product

EXCLUDED = -60.0
"""log π' of listed ids that were not kept. Their recorded log μ is far below."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the trained tokens, in float32."""

    logprobs_n: Tensor
    """log π of the token."""
    entropy_n: Tensor
    """Entropy of the token's distribution; detached."""
    top_nk: Tensor | None = None
    """log π of other ids, such as the teacher's likeliest; None if the microbatch has none."""


def token_logprobs(
    logits_nv: Tensor, targets_n: Tensor, temperatures_n: Tensor, ids_nk: Tensor | None = None
) -> TokenLogprobs:
    """Compute log π of the targets and of other ids, and the entropy of their distributions.

    The distribution is softmax(logits ÷ temperature), from which the engine samples and reports logprobs.
    """
    logprobs_nv = torch.log_softmax(logits_nv.float() / temperatures_n[:, None], dim=-1)
    with torch.no_grad():
        entropy_n = torch.special.entr(logprobs_nv.exp()).sum(dim=-1)
    # One gather for all: the gradient of each is as large as the logits.
    ids_nm = targets_n[:, None] if ids_nk is None else torch.cat([targets_n[:, None], ids_nk], dim=1)
    logprobs_nm = logprobs_nv.gather(1, ids_nm)
    return TokenLogprobs(logprobs_nm[:, 0], entropy_n, None if ids_nk is None else logprobs_nm[:, 1:])


def narrowed(scored: TokenLogprobs, kept_nm: Tensor, listed_nk: Tensor | None = None) -> TokenLogprobs:
    """Renormalise over the ids that the sampler kept: log π'(y) = log π(y) − log Σ_{v ∈ kept} π(v).

    The gradient is ∇ log π(y) − Σ_{v ∈ kept} π'(v) ∇ log π(v), whose mean under π' is 0. The set is the
    sampler's, and constant ("keep sampling mask"; DeepSeek-V3.2, arXiv 2512.02556, 2025, §3.1).

    Args:
        scored: of the whole vocabulary; log π of the kept ids comes last.
        kept_nm: these ids, as in `Microbatch`.
        listed_nk: log μ of the sampler's likeliest ids, which come before the kept ones; ids that were not
            kept have π' = 0, as μ = 0.
    """
    assert scored.top_nk is not None
    width = scored.top_nk.shape[1] - kept_nm.shape[1]
    absent_nm = kept_nm < 0
    whole_n = absent_nm[:, 0]
    # A row without kept ids is −inf throughout, and the gradient of its logsumexp would be NaN.
    of_kept_nm = (
        scored.top_nk[:, width:].masked_fill(absent_nm, -torch.inf).masked_fill(whole_n[:, None], 0.0)
    )
    normaliser_n = of_kept_nm.logsumexp(dim=1).masked_fill(whole_n, 0.0)  # constant where all ids were kept
    top_nk = scored.top_nk[:, :width]
    if listed_nk is not None:
        others = width - listed_nk.shape[1]  # the teacher's
        own_nk = top_nk[:, others:] - normaliser_n[:, None]
        own_nk = own_nk.masked_fill((listed_nk < EXCLUDED) & ~whole_n[:, None], EXCLUDED)
        top_nk = torch.cat([top_nk[:, :others], own_nk], dim=1)
    return TokenLogprobs(scored.logprobs_n - normaliser_n, scored.entropy_n, top_nk if width else None)


def logprobs_in_pieces(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    dtype: torch.dtype,
    size: int,
    targets_n: Tensor,
    temperatures_n: Tensor,
    ids_nk: Tensor | None = None,
    *,
    compiled: bool = False,
) -> TokenLogprobs:
    """Compute `token_logprobs` of the logits hidden · weightᵀ, for `size` tokens at a time.

    Products have factors in `dtype` and sums in float32. `compiled` joins the operations on logits.
    """
    ids_nm = targets_n[:, None] if ids_nk is None else torch.cat([targets_n[:, None], ids_nk], dim=1)
    logprobs_nm, entropy_n = _Pieces.apply(  # type: ignore[no-untyped-call]
        hidden_nd, weight_vd, dtype, size, ids_nm, temperatures_n, compiled
    )
    return TokenLogprobs(logprobs_nm[:, 0], entropy_n, None if ids_nk is None else logprobs_nm[:, 1:])


class _Pieces(torch.autograd.Function):
    """(hidden, weight) → (log π of `ids_nm`, entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        dtype: torch.dtype,
        size: int,
        ids_nm: Tensor,
        temperatures_n: Tensor,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_vd.to(dtype)
        score = _compiled(_score) if compiled else _score
        found = [
            score(product(hidden.to(dtype), weight.t()), *more)
            for hidden, *more in _split(size, hidden_nd, ids_nm, temperatures_n)
        ]
        logprobs_nm, entropy_n, normaliser_n = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden_nd, weight_vd, ids_nm, temperatures_n, normaliser_n)
        ctx.dtype, ctx.size, ctx.compiled = dtype, size, compiled
        ctx.mark_non_differentiable(entropy_n)
        return logprobs_nm, entropy_n

    @staticmethod
    def backward(ctx: Any, gradient_nm: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_nd, weight_vd, *more_n = ctx.saved_tensors
        weight = weight_vd.to(ctx.dtype)
        differentiate = _compiled(_gradient) if ctx.compiled else _gradient
        by_hidden: list[Tensor] = []
        by_weight = torch.zeros_like(weight_vd) if ctx.needs_input_grad[1] else None
        for hidden, *more in _split(ctx.size, hidden_nd, *more_n, gradient_nm):
            rounded = hidden.to(ctx.dtype)
            by_logits = differentiate(product(rounded, weight.t()), ctx.dtype, *more)
            if ctx.needs_input_grad[0]:
                by_hidden.append(product(by_logits, weight).to(hidden.dtype))
            if by_weight is not None:
                by_weight += product(by_logits.t(), rounded)
        return torch.cat(by_hidden) if by_hidden else None, by_weight, None, None, None, None, None


def _score(logits_nv: Tensor, ids_nm: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log π of the ids, the entropy, and the logarithm of the normaliser."""
    logits_nv = logits_nv / temperatures_n[:, None]
    # A logit less its log π is the logarithm of the normaliser, which needs no pass of its own.
    chosen_n = logits_nv.gather(1, ids_nm[:, :1]).squeeze(1)
    logits_nv = torch.log_softmax(logits_nv, dim=-1)
    logprobs_nm = logits_nv.gather(1, ids_nm)
    # In place: one more tensor of this size would be the peak of memory.
    entropy_n = torch.special.entr(logits_nv.exp_()).sum(dim=-1)
    return logprobs_nm, entropy_n, chosen_n - logprobs_nm[:, 0]


def _gradient(
    logits_nv: Tensor,
    dtype: torch.dtype,
    ids_nm: Tensor,
    temperatures_n: Tensor,
    normaliser_n: Tensor,
    gradient_nm: Tensor,
) -> Tensor:
    """Return the gradient by the logits before they are divided by the temperature, in `dtype`."""
    gradient_nm = gradient_nm / temperatures_n[:, None]
    shares_nv = logits_nv.div(temperatures_n[:, None]).sub_(normaliser_n[:, None]).exp_()
    by_logits_nv = shares_nv.mul_(-gradient_nm.sum(dim=1, keepdim=True))
    return by_logits_nv.scatter_add_(1, ids_nm, gradient_nm).to(dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # For any size: the last piece of a batch may have any number of tokens.
    return torch.compile(function, dynamic=True)


def _split(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of n tokens into pieces of at most `size`."""
    yield from zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
