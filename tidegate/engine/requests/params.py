"""Sampling parameters: parses and validates SGLang's `sampling_params`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from tidegate.engine.validation import PARAMS, boolean, integer, invalid_parameter, number, refuse_unsupported
from tidegate.settings.servers import GREEDY_BELOW

UNSET_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "min_new_tokens": (None, 0),
    "logit_bias": (None,),
    "structural_tag": (None,),
    "custom_params": (None,),
    "stop_regex": (None, []),
    "no_stop_trim": (None, False),
    "spaces_between_special_tokens": (None, True),
}
"""Unsupported sampling parameters of SGLang, with their neutral values."""

GRAMMARS = ("json_schema", "regex", "ebnf")
"""Kinds of grammar; a request has at most one."""
MAX_SAMPLES = 128
"""Maximum number of replies to one prompt."""


class GrammarSource(NamedTuple):
    """A grammar before compilation: its kind (one of GRAMMARS) and its text."""

    kind: str
    text: str


class TokenLimits(NamedTuple):
    """Limits of the loaded model."""

    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    has_tokenizer: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters under SGLang's names, with neutral defaults.

    `temperature` 0 is greedy. `top_p` 1, `top_k` ≤ 0, `min_p` 0 and penalties of 0 (frequency, presence) and
    1 (repetition) have no effect. `tidegate.engine.model.sampling` describes their order and which of them
    affect logprobs. `n` is the number of replies.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    _: KW_ONLY
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    n: int = 1
    grammar: GrammarSource | None = None
    skip_special_tokens: bool = True

    @property
    def narrows(self) -> bool:
        """Whether top-p, top-k or min-p may exclude ids; in float32, as the sampler has them."""
        excludes = np.float32(self.top_p) < 1 or self.top_k > 0 or np.float32(self.min_p) > 0
        return bool(np.float32(self.temperature) >= GREEDY_BELOW and excludes)

    @property
    def penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)


def read_params(body: Mapping[str, Any], limits: TokenLimits) -> SamplingParams:
    fields = dict(body)
    ignore_eos = boolean(fields, "ignore_eos", False, PARAMS)
    stop_ids = _stop_ids(fields.pop("stop_token_ids", None))
    params = SamplingParams(
        temperature=_within(fields, "temperature", 1.0, 0, None),
        top_p=_positive(fields, "top_p", 1),
        top_k=integer(fields, "top_k", -1),
        min_p=_within(fields, "min_p", 0.0, 0, 1),
        frequency_penalty=_within(fields, "frequency_penalty", 0.0, -2, 2),
        presence_penalty=_within(fields, "presence_penalty", 0.0, -2, 2),
        repetition_penalty=_positive(fields, "repetition_penalty", 2),
        max_new_tokens=_count(fields, "max_new_tokens", 128, None, minimum=0),
        stop=_stop(fields.pop("stop", None), limits),
        stop_ids=frozenset() if ignore_eos else limits.eos_ids | stop_ids,
        seed=_seed(fields.pop("sampling_seed", None)),
        n=_count(fields, "n", 1, MAX_SAMPLES),
        grammar=_grammar(fields),
        skip_special_tokens=boolean(fields, "skip_special_tokens", True, PARAMS),
    )
    refuse_unsupported(fields, UNSET_PARAMS, PARAMS)
    return params


def _within(fields: dict[str, Any], name: str, default: float, low: float, high: float | None) -> float:
    value = number(fields, name, default)
    if value < low or (high is not None and value > high):
        bounds = f"it must be at least {low}" if high is None else f"it must be between {low} and {high}"
        raise invalid_parameter(name, value, bounds)
    return value


def _positive(fields: dict[str, Any], name: str, high: int) -> float:
    value = number(fields, name, 1.0)
    if not 0 < value <= high:
        raise invalid_parameter(name, value, f"it must be more than 0 and at most {high}")
    return value


def _count(fields: dict[str, Any], name: str, default: int, maximum: int | None, *, minimum: int = 1) -> int:
    value = integer(fields, name, default)
    if value < minimum:
        raise invalid_parameter(name, value, f"it must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise invalid_parameter(name, value, f"it must be at most {maximum}")
    return value


def _seed(value: Any) -> int:
    if value is None:
        return secrets.randbits(64)
    if type(value) is not int:
        raise invalid_parameter("sampling_seed", value, "it must be an integer")
    return value % 2**64


def _grammar(fields: dict[str, Any]) -> GrammarSource | None:
    values = {kind: fields.pop(kind, None) for kind in GRAMMARS}
    grammars = {kind: text for kind, text in values.items() if text is not None}
    for kind, text in grammars.items():
        if not isinstance(text, str) or not text:
            raise invalid_parameter(kind, text, "it must be a non-empty string")
    if len(grammars) > 1:
        first, second, *_ = grammars
        raise invalid_parameter(second, grammars[second], f"{first} is given too; give only one of them")
    return GrammarSource(*next(iter(grammars.items()))) if grammars else None


def _stop(value: Any, limits: TokenLimits) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(stop, str) and stop for stop in strings):
        raise invalid_parameter("stop", value, "it must be a list of non-empty strings")
    if strings and not limits.has_tokenizer:
        raise invalid_parameter(
            "stop", value, "stop strings need a tokenizer, and the model directory has none"
        )
    return tuple(strings)


def _stop_ids(value: Any) -> frozenset[int]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(stop_id) is int for stop_id in ids):
        raise invalid_parameter("stop_token_ids", value, "it must be a list of token ids")
    return frozenset(ids)
