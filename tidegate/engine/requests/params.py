"""How a reply is sampled: SGLang's `sampling_params`, checked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tidegate.engine.validation import PARAMS, boolean, integer, number, refusal, refuse_rest

UNSET_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "min_new_tokens": (None, 0),
    "logit_bias": (None,),
    "structural_tag": (None,),
    "custom_params": (None,),
    "stop_regex": (None, []),
    "no_stop_trim": (None, False),
    "spaces_between_special_tokens": (None, True),
}
"""Sampling parameters of SGLang that this engine has not, with the values that change nothing."""

GRAMMARS = ("json_schema", "regex", "ebnf")
"""What a reply may be bound to; at most one of them."""
MAX_SAMPLES = 128
"""Replies to one prompt that a request may ask for."""


class GrammarSource(NamedTuple):
    """A grammar as the caller wrote it: one of GRAMMARS, and its text."""

    kind: str
    text: str


class TokenLimits(NamedTuple):
    """What the loaded model allows."""

    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    has_tokenizer: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's names, with its neutral values as defaults.

    `temperature` 0 is greedy; `top_p` 1, `top_k` ≤ 0, `min_p` 0, penalties 0 (frequency, presence) and 1
    (repetition) are off. `tidegate.engine.model.sampling` says in which order they act and what of them the
    logprobs show. `n` is how many replies are sampled.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    n: int = 1
    grammar: GrammarSource | None = None
    skip_special_tokens: bool = True

    @property
    def penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)


def read_params(given: Mapping[str, Any], limits: TokenLimits) -> SamplingParams:
    """Raises RequestError that names the parameter."""
    rest = dict(given)
    ignore_eos = boolean(rest, "ignore_eos", False, PARAMS)
    stop_ids = _stop_ids(rest.pop("stop_token_ids", None))
    params = SamplingParams(
        temperature=_within(rest, "temperature", 1.0, 0, None),
        top_p=_top_p(rest),
        top_k=integer(rest, "top_k", -1),
        min_p=_within(rest, "min_p", 0.0, 0, 1),
        frequency_penalty=_within(rest, "frequency_penalty", 0.0, -2, 2),
        presence_penalty=_within(rest, "presence_penalty", 0.0, -2, 2),
        repetition_penalty=_repetition_penalty(rest),
        max_new_tokens=_count(rest, "max_new_tokens", 128, None),
        stop=_stop(rest.pop("stop", None), limits),
        stop_ids=frozenset() if ignore_eos else limits.eos_ids | stop_ids,
        seed=_seed(rest.pop("sampling_seed", None)),
        n=_count(rest, "n", 1, MAX_SAMPLES),
        grammar=_grammar(rest),
        skip_special_tokens=boolean(rest, "skip_special_tokens", True, PARAMS),
    )
    refuse_rest(rest, UNSET_PARAMS, PARAMS)
    return params


def _within(rest: dict[str, Any], name: str, default: float, low: float, high: float | None) -> float:
    value = number(rest, name, default)
    if value < low or (high is not None and value > high):
        bounds = f"it is at least {low}" if high is None else f"it is between {low} and {high}"
        raise refusal(name, value, bounds)
    return value


def _top_p(rest: dict[str, Any]) -> float:
    value = number(rest, "top_p", 1.0)
    if not 0 < value <= 1:
        raise refusal("top_p", value, "it is more than 0 and at most 1")
    return value


def _repetition_penalty(rest: dict[str, Any]) -> float:
    value = number(rest, "repetition_penalty", 1.0)
    if not 0 < value <= 2:
        raise refusal("repetition_penalty", value, "it is more than 0 and at most 2")
    return value


def _count(rest: dict[str, Any], name: str, default: int, most: int | None) -> int:
    value = integer(rest, name, default)
    if value < 1:
        raise refusal(name, value, "it is at least 1")
    if most is not None and value > most:
        raise refusal(name, value, f"it is at most {most}")
    return value


def _seed(value: Any) -> int:
    if value is None:
        return secrets.randbits(64)
    if type(value) is not int:
        raise refusal("sampling_seed", value, "it is an integer")
    return value % 2**64


def _grammar(rest: dict[str, Any]) -> GrammarSource | None:
    given = {kind: rest.pop(kind, None) for kind in GRAMMARS}
    asked = {kind: text for kind, text in given.items() if text is not None}
    for kind, text in asked.items():
        if not isinstance(text, str) or not text:
            raise refusal(kind, text, "it is a string that is not empty")
    if len(asked) > 1:
        first, second, *_ = asked
        raise refusal(second, asked[second], f"{first} is given too; a reply follows one of them")
    return GrammarSource(*next(iter(asked.items()))) if asked else None


def _stop(value: Any, limits: TokenLimits) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise refusal("stop", value, "it is a list of strings that are not empty")
    if strings and not limits.has_tokenizer:
        raise refusal("stop", value, "this model directory has no tokenizer to find strings with")
    return tuple(strings)


def _stop_ids(value: Any) -> frozenset[int]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise refusal("stop_token_ids", value, "it is a list of token ids")
    return frozenset(ids)
