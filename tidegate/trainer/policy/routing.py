"""Routing replay: the trainer computes each token with the experts that the engine chose for it.

Rollout routing replay (R3; Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers, arXiv 2510.11370, 2025). A small difference between engine and trainer changes the top-k
of a router, and with it the probability of a token, by much. The recorded experts replace the top-k alone:
their weights are computed from the trainer's own logits,

    g_i = exp(s_i) ÷ Σ_j exp(s_j), j over all experts, or over the recorded ones in models that normalise,

so the gradient reaches the router, and no expert but the recorded ones.

`use_autocast` makes experts compute in autocast's type: torch does not convert the factors of grouped matrix
products itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidegate.errors import StartError
from tidegate.weights.internals import routers

ARGUMENT = "replayed_experts"
"""Argument of a decoder layer, so that a layer that is recomputed in the backward pass gets the same ones."""
_PROBES = 64


class RoutingReplay:
    """Replaces the experts that a model's routers choose, in passes under `experts`.

    Create it before the layers' `forward` is wrapped for recomputation or compiled.

    Args:
        layers: The decoder layers, in their order.
        normalised: What `normalises` found.

    Attributes:
        width: Number of layers, times that of the experts of a token.
        count: Number of experts in a layer.
    """

    def __init__(self, model: Any, layers: Sequence[Any], normalised: bool) -> None:
        self._current: Tensor | None = None
        found = routers(model)
        for number, router in found.items():
            layer, place = layers[number], _Place()
            router.forward = partial(_route, place, router.forward, normalised)
            layer.forward = partial(_with_experts, place, layer.forward)
            layer.register_forward_pre_hook(partial(self._give, number), with_kwargs=True)
        router = next(iter(found.values()))
        self._layers = len(layers)
        self.width = self._layers * router.top_k
        self.count = router.weight.shape[0]

    @contextmanager
    def experts(self, experts_btm: Tensor | None) -> Iterator[None]:
        """Replay these experts, [b, t, layers · k], in the passes within; None: the routers choose."""
        if experts_btm is not None:
            self._current = experts_btm.view(-1, self._layers, self.width // self._layers)
        try:
            yield
        finally:
            self._current = None

    def _give(
        self, number: int, _: Any, inputs: tuple[Any, ...], more: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return None if self._current is None else (inputs, {**more, ARGUMENT: self._current[:, number]})


class _Place:
    """Where a layer leaves the experts, [tokens, k], for its router."""

    experts: Tensor | None = None


def _with_experts(place: _Place, forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    place.experts = more.pop(ARGUMENT, None)
    try:
        return forward(*inputs, **more)
    finally:
        place.experts = None


def _route(place: _Place, forward: Callable[..., Any], normalised: bool, hidden: Tensor) -> Any:
    logits, weights, chosen = forward(hidden)
    if place.experts is None:
        return logits, weights, chosen
    chosen = place.experts.to(chosen.dtype)
    return logits, weights_of(logits, chosen, normalised).to(weights.dtype), chosen


def weights_of(logits: Tensor, chosen: Tensor, normalised: bool) -> Tensor:
    """Return the weights of chosen experts, [tokens, k]: g_i of the module's formula."""
    weights = torch.softmax(logits.float(), dim=-1).gather(1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True) if normalised else weights


@torch.no_grad()
def normalises(model: Any) -> bool:
    """Return whether the weights of a token's experts are normalised to the sum 1.

    Raises:
        StartError: The model has no experts, or its routers compute the weights in another way.
    """
    found = routers(model)
    kind = type(model).__name__
    if not found:
        raise StartError(
            f"trainer.routing_replay = true, but {kind} has no routers of experts that Tidegate knows: "
            "remove it"
        )
    for normalised in (True, False):
        if all(_agrees(router, normalised) for router in found.values()):
            return normalised
    raise StartError(
        f"trainer.routing_replay = true, but the routers of {kind} do not weight the experts by a softmax of "
        "their logits, the only rule that replay knows: remove it"
    )


def _agrees(router: Any, normalised: bool) -> bool:
    # A generator of its own: the run's random numbers must not depend on this check.
    generator = torch.Generator(router.weight.device).manual_seed(0)
    hidden = torch.randn(
        _PROBES, router.weight.shape[1], generator=generator, device=router.weight.device
    ).to(router.weight.dtype)
    logits, weights, chosen = router(hidden)
    return torch.allclose(weights_of(logits, chosen, normalised), weights.float(), rtol=1e-3, atol=1e-4)


AUTOCAST_EXPERTS = "grouped_mm_in_autocast"


def use_autocast(model: Any) -> None:
    """Have a model compute its experts in the type of autocast, if it computes them as grouped products."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # a transformers without grouped products
        return
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    for config in configs.values():
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_EXPERTS, experts)
            config._experts_implementation = AUTOCAST_EXPERTS


def experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return grouped_mm_experts_forward(module, hidden, index, weights)  # type: ignore[no-any-return]
    dtype = torch.get_autocast_dtype(kind)
    result: Tensor = grouped_mm_experts_forward(_Cast(module, dtype), hidden.to(dtype), index, weights)
    return result.to(hidden.dtype)


class _Cast:
    """A module whose parameters are converted when they are read."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value
