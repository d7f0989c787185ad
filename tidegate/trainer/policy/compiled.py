"""Compiled decoder layers: torch.compile joins the elementwise operations between two matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache


def compile_layers(layers: Iterable[Any]) -> None:
    """Compile these modules' forward, for inputs of any size.

    Wraps `forward` rather than the call, so that hooks, such as FSDP's, run outside. All layers share one
    compiled graph. With a cache, as for shared prefixes, a layer depends on its number and is not compiled.
    """
    for layer in layers:
        layer.forward = partial(_forward, layer.forward, torch.compile(layer.forward, dynamic=True))


def _forward(plain: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    cached = any(isinstance(value, Cache) for value in more.values())
    return (plain if cached else compiled)(*inputs, **more)
