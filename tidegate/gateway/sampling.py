"""How a reply is sampled: the session's sampling, the agent's wishes, the engine's bounds.

In split `train` the session's temperature, top-p and top-k override the agent's, penalties and min-p are off:
otherwise the recorded logprobs are not those of a distribution that the trainer can form. `eval` honours
the agent's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tidegate.gateway.errors import context_exceeded
from tidegate.gateway.seeds import turn_seed
from tidegate.types import Sampling, Split

log = logging.getLogger("tidegate.gateway")


StructuredOutput = Literal["text", "grammar"]


class Schema(NamedTuple):
    """A JSON schema that the reply must have, and the parameter that asked for it."""

    param: str
    text: str


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """What the agent asked for; None where it did not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_param: str = "stop"
    """What the agent's dialect calls `stop`."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Those that are not at their neutral value."""
    schema: Schema | None = None


class SamplingRules:
    """Decides each call's sampling parameters, and says once in the log what it overrode."""

    def __init__(
        self,
        stop_ids: Sequence[int],
        structured_output: StructuredOutput = "text",
        overridden: Counter[str] | None = None,
    ) -> None:
        self._stop_ids = list(stop_ids)
        self._structured_output = structured_output
        self._overridden = Counter[str]() if overridden is None else overridden
        """Requests by the parameter of the agent's that had no effect."""
        self._said: set[tuple[str, ...]] = set()

    def params(
        self,
        wishes: RequestedSampling,
        sampling: Sampling,
        env: str,
        split: Split,
        seed: int | None,
        turn: int,
    ) -> dict[str, Any]:
        """The engine's sampling parameters, `max_new_tokens` apart. Raises Refusal by name."""
        if split == "train":
            self._say(wishes, sampling, env, seed)
            temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
        else:
            temperature = sampling.temperature if wishes.temperature is None else wishes.temperature
            top_p = sampling.top_p if wishes.top_p is None else wishes.top_p
            top_k = sampling.top_k if wishes.top_k is None else wishes.top_k
        params: dict[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "stop_token_ids": self._stop_ids,
        }
        if split != "train":
            params |= wishes.penalties
        if wishes.schema is not None and self.structured(wishes, split) == "grammar":
            params["json_schema"] = wishes.schema.text
        if wishes.stop:
            params["stop"] = list(wishes.stop)
        if (one := turn_seed(seed, turn, wishes.seed)) is not None:
            params["sampling_seed"] = one
        return params

    def structured(self, wishes: RequestedSampling, split: Split) -> StructuredOutput | None:
        """How a reply that must have a schema is sampled; None where the agent asked for none."""
        if wishes.schema is None:
            return None
        return self._structured_output if split == "train" else "grammar"

    def asked(self, wishes: RequestedSampling, split: Split) -> dict[str, str]:
        """The engine's sampling parameters that are the agent's own wish, with the agent's names for them."""
        asked = {"stop": wishes.stop_param} if wishes.stop else {}
        if split != "train":
            given = {name for name in ("temperature", "top_p", "top_k") if getattr(wishes, name) is not None}
            asked |= {name: name for name in (*sorted(given), *wishes.penalties)}
        if wishes.schema is not None and self.structured(wishes, split) == "grammar":
            asked["json_schema"] = wishes.schema.param
        return asked

    def _say(self, wishes: RequestedSampling, sampling: Sampling, env: str, seed: int | None) -> None:
        asked = {
            name: value
            for name, value in (
                ("temperature", wishes.temperature),
                ("top_p", wishes.top_p),
                ("top_k", wishes.top_k),
                *wishes.penalties.items(),
            )
            if value is not None and value != getattr(sampling, name, None)
        }
        if wishes.seed is not None and seed is not None:
            asked["seed"] = wishes.seed
        self._overridden.update(asked.keys())
        kind = (env, *sorted(asked))
        if asked and kind not in self._said:
            self._said.add(kind)
            log.warning(
                "training sessions of %s: the agent's %s have no effect; logprobs are recorded under the "
                "session's temperature %g, top_p %g, top_k %d, its own seeds and no penalties; said once",
                env or "no environment",
                ", ".join(f"{name} = {value!r}" for name, value in asked.items()),
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )


def token_budget(
    prompt: int, wished: int | None, sampling: Sampling, max_context: int | None, left: int | None = None
) -> int:
    """How many tokens may be sampled after a prompt of so many; raises Refusal if there is no room.

    `left` is what the session's own budget has left.
    """
    most = min(one for one in (wished, left, sampling.max_tokens) if one is not None)
    if max_context is None:
        return most
    if prompt >= max_context:
        raise context_exceeded(prompt, max_context)
    return min(most, max_context - prompt)
