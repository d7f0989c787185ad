"""Activation checkpointing: a decoder layer keeps only its inputs and is recomputed in the backward pass.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicLayer


def checkpoint_layers(layers: Iterable[Any]) -> None:
    """Recompute these modules in the backward pass.

    Wraps `forward` rather than the call, so that hooks, such as FSDP's, run once.
    """
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Run a layer's forward under checkpointing. RNG state need not be kept: dropout is off."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **more)
    # By type, not by name: the argument's name depends on the version of transformers.
    more = {
        name: _RecomputeCache(value) if isinstance(value, Cache) else value for name, value in more.items()
    }
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **more)


class _RecomputeCache:
    """Presents the same cache to both computations of a layer.

    A prefix's keys and values stay unchanged. Without a prefix, only the first pass writes the layer's own
    keys and values into the cache.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._filled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's cached keys and values with the new ones appended."""
        result: tuple[Tensor, Tensor]
        cached = self._cache.layers[layer] if layer < len(self._cache.layers) else None
        if not self._filled and (cached is None or not cached.is_initialized):
            self._filled = True
            result = self._cache.update(keys, values, layer, *more, **named)
            return result
        temporary = DynamicLayer()
        if cached is not None and not self._filled:
            temporary.update(cached.keys, cached.values)
        result = temporary.update(keys, values)
        return result
