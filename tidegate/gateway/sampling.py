"""Determines the sampling parameters of calls.

They follow from the session's settings, the agent's request and the engine's limits. In split
`train` the session's temperature, top-p, top-k and min-p override the agent's, and penalties are off:
otherwise the recorded logprobs would belong to a distribution that the trainer cannot compute. The ids that
top-p, top-k and min-p keep are recorded, so a session may leave these three to the agent. In `eval` the
agent's parameters apply.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from tidegate.gateway.errors import ApiError, context_exceeded
from tidegate.settings.servers import DEFAULT_KEPT, MAX_KEPT
from tidegate.types import Sampling, Split

log = logging.getLogger("tidegate.gateway")

StructuredOutput = Literal["text", "grammar"]
NARROWING = ("top_p", "top_k", "min_p")
"""Parameters that exclude ids and leave the ratios between the others."""


class Schema(NamedTuple):
    """A JSON schema for the reply, and the name of the request parameter that set it."""

    param: str
    text: str


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """Sampling parameters of the agent's request; None where unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_param: str = "stop"
    """Name of `stop` in the agent's dialect."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Penalties that differ from their neutral values, and min-p."""
    _: KW_ONLY
    schema: Schema | None = None


class SamplingRules:
    """Determines each call's sampling parameters and logs overridden ones once."""

    def __init__(
        self,
        stop_ids: Sequence[int],
        structured_output: StructuredOutput = "text",
        overridden: Counter[str] | None = None,
    ) -> None:
        self._stop_ids = list(stop_ids)
        self._structured_output = structured_output
        self._overridden = Counter[str]() if overridden is None else overridden
        """Number of requests by overridden parameter."""
        self._logged: set[tuple[str, ...]] = set()

    def params(
        self,
        requested: RequestedSampling,
        sampling: Sampling,
        env: str,
        split: Split,
        seed: int | None,
        turn: int,
    ) -> dict[str, Any]:
        """Returns the engine's sampling parameters, except `max_new_tokens`."""
        chosen = sampling
        if split != "train" or sampling.narrowed_by_agents:
            chosen = replace(
                sampling,
                top_p=sampling.top_p if requested.top_p is None else requested.top_p,
                top_k=sampling.top_k if requested.top_k is None else requested.top_k,
                min_p=requested.penalties.get("min_p", sampling.min_p),
            )
        if split == "train":
            self._log_overrides(requested, sampling, env, seed)
            chosen = _bounded(chosen)
        elif requested.temperature is not None:
            chosen = replace(chosen, temperature=requested.temperature)
        params: dict[str, Any] = {
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": chosen.top_k,
            "stop_token_ids": self._stop_ids,
        }
        if chosen.min_p:
            params["min_p"] = chosen.min_p
        if split != "train":
            params |= requested.penalties
        if requested.schema is not None and self.structured(requested, split) == "grammar":
            params["json_schema"] = requested.schema.text
        if requested.stop:
            params["stop"] = list(requested.stop)
        if (sampling_seed := turn_seed(seed, turn, requested.seed)) is not None:
            params["sampling_seed"] = sampling_seed
        return params

    def structured(self, requested: RequestedSampling, split: Split) -> StructuredOutput | None:
        """Returns how a reply with a schema is sampled; None without a schema."""
        if requested.schema is None:
            return None
        return self._structured_output if split == "train" else "grammar"

    def requested_params(
        self, requested: RequestedSampling, split: Split, *, narrowed_by_agents: bool = False
    ) -> dict[str, str]:
        """Maps the engine's parameters that the agent has set to the agent's names for them."""
        requested_params = {"stop": requested.stop_param} if requested.stop else {}
        given = {name for name in ("temperature", "top_p", "top_k") if getattr(requested, name) is not None}
        given |= requested.penalties.keys()
        if split == "train":
            given &= set(NARROWING) if narrowed_by_agents else set()
        requested_params |= {name: name for name in sorted(given)}
        if requested.schema is not None and self.structured(requested, split) == "grammar":
            requested_params["json_schema"] = requested.schema.param
        return requested_params

    def _log_overrides(
        self, requested: RequestedSampling, sampling: Sampling, env: str, seed: int | None
    ) -> None:
        requested_params = {
            name: value
            for name, value in (
                ("temperature", requested.temperature),
                ("top_p", requested.top_p),
                ("top_k", requested.top_k),
                *requested.penalties.items(),
            )
            if value is not None
            and value != getattr(sampling, name, None)
            and not (sampling.narrowed_by_agents and name in NARROWING)
        }
        if requested.seed is not None and seed is not None:
            requested_params["seed"] = requested.seed
        self._overridden.update(requested_params.keys())
        kind = (env, *sorted(requested_params))
        if requested_params and kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "training sessions of %s: the agent's %s have no effect; logprobs are recorded under the "
                "session's temperature %g, top_p %g, top_k %d, its own seeds and no penalties (logged once)",
                env or "no environment",
                ", ".join(f"{name} = {value!r}" for name, value in requested_params.items()),
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )


def narrows(params: Mapping[str, Any]) -> bool:
    """Whether the engine's sampling parameters may exclude ids."""
    return bool(params["top_p"] < 1 or params["top_k"] > 0 or params.get("min_p"))


def _bounded(sampling: Sampling) -> Sampling:
    """Bounds the number of ids that are recorded for each token. Raises ApiError for a larger top-k."""
    if sampling.top_k > MAX_KEPT:
        raise ApiError(
            f"top_k = {sampling.top_k}: in training it must be at most {MAX_KEPT}, because the kept ids are "
            "recorded for each token",
            param="top_k",
        )
    return replace(sampling, top_k=DEFAULT_KEPT) if sampling.narrows and sampling.top_k <= 0 else sampling


def token_budget(
    prompt: int,
    requested: int | None,
    sampling: Sampling,
    max_context: int | None,
    remaining: int | None = None,
) -> int:
    """Returns the number of tokens that may be sampled after a prompt of `prompt` tokens.

    `remaining` is the rest of the session's token budget. Raises ApiError if the prompt fills the context.
    """
    limit = min(bound for bound in (requested, remaining, sampling.max_tokens) if bound is not None)
    if max_context is None:
        return limit
    if prompt >= max_context:
        raise context_exceeded(prompt, max_context)
    return min(limit, max_context - prompt)


def turn_seed(session: int | None, turn: int, agent: int | None) -> int | None:
    """Returns a turn's seed, which is the same in every run of a session with the same seed.

    An agent's constant seed must not make the slots of a group equal, so the session's seed is mixed in.
    """
    if session is None:
        return None if agent is None else agent & 0x7FFFFFFF
    return _seed(f"{session}/{turn}/{agent}")


def continued_seed(seed: int, sampled: int) -> int:
    """Returns the seed with which an interrupted generation resumes after `sampled` tokens."""
    return _seed(f"{seed}+{sampled}")


def _seed(text: str) -> int:
    digest = blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
