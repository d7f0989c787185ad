"""Activation checkpointing: a decoder layer keeps only what goes into it, and the rest is computed again on
the way back (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicLayer


def recompute(layers: Iterable[Any]) -> None:
    """Have these modules computed again on the way back, from now on.

    It is `forward` that is done twice, not the call: what hooks do, FSDP's above all, is done once.
    """
    for layer in layers:
        layer.forward = partial(_twice, layer.forward)


def _twice(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """A layer's forward, now and on the way back. Nothing in it is random: dropout is off."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **more)
    if more.get("past_key_values") is not None:
        more["past_key_values"] = _Cache(more["past_key_values"])
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **more)


class _Cache:
    """A cache as one layer sees it: what it holds is the same whenever the layer is computed.

    Keys and values that the layer goes on from stay as they are. Where there are none the first pass puts
    the layer's own into the cache, and the second does not do so again.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._filled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Those before, with these behind."""
        found: tuple[Tensor, Tensor]
        known = self._cache.layers[layer] if layer < len(self._cache.layers) else None
        if not self._filled and (known is None or not known.is_initialized):
            self._filled = True
            found = self._cache.update(keys, values, layer, *more, **named)
            return found
        passing = DynamicLayer()
        if known is not None and not self._filled:
            passing.update(known.keys, known.values)
        found = passing.update(keys, values)
        return found
