"""What `/generate` was asked for, checked; and a request as it lives in the engine."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidegate.engine.prefix import Chain
from tidegate.errors import TidegateError

UNSET_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "text": (None,),
    "image_data": (None,),
    "audio_data": (None,),
    "video_data": (None,),
    "input_embeds": (None,),
    "lora_path": (None,),
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None,),
    "return_text_in_logprobs": (None, False),
    "return_hidden_states": (None, False),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    # What SGLang's router adds.
    "model": (None,),
    "log_metrics": (None, True, False),
    "no_logs": (None, False, True),
    "background": (None, False),
    "return_bytes": (None, False),
    "return_entropy": (None, False),
}
"""Fields of SGLang's request that this engine has not, with the values that change nothing."""

UNSET_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "min_p": (None, 0),
    "min_new_tokens": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None,),
    "stop_regex": (None, []),
    "no_stop_trim": (None, False),
    "spaces_between_special_tokens": (None, True),
}
"""Sampling parameters of SGLang that this engine has not, with the values that change nothing."""


class RequestError(TidegateError):
    """A request that is refused (400); the message names the field."""


class Limits(NamedTuple):
    """What the loaded model allows."""

    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    has_tokenizer: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's names. `temperature` 0 is greedy; `top_p` 1 and `top_k` ≤ 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    skip_special_tokens: bool = True


@dataclass(slots=True, eq=False)
class Generation:
    """One request. The scheduler's thread writes it; the event loop reads it.

    `spans` are (version label, start, end) over output tokens. `kv_version` is the oldest version in
    its keys and values, set once they were kept across an update of the weights. `finish_reason` or
    `error` is set when it ended.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    """Output tokens that it may have: `max_new_tokens`, or what the context leaves."""
    stream: bool = False
    return_logprob: bool = False
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    kv_version: str | None = None
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were there when it first got a row."""
    chain: Chain = field(default_factory=Chain)
    finish_reason: dict[str, Any] | None = None
    error: str | None = None
    refused: bool = False
    """The error is the caller's (400)."""
    started: float = field(default_factory=time.monotonic)
    wake: asyncio.Event | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def past(self) -> list[int]:
        """All of its tokens but the last, which is the input of its next step."""
        return (self.prompt_ids + self.output_ids)[:-1]

    def close_span(self, version: str) -> None:
        """The output tokens since the last span were sampled under `version`."""
        start = self.spans[-1][2] if self.spans else 0
        end = len(self.output_ids)
        if end == start:
            return
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], end)
        else:
            self.spans.append((version, start, end))


def parse_generate(body: Any, limits: Limits) -> Generation:
    """Check the body of `/generate`; raises RequestError that names what is wrong."""
    fields = dict(_mapping(body, "the body"))
    prompt_ids = _prompt(fields.pop("input_ids", None), limits)
    params = _params(_mapping(fields.pop("sampling_params", None) or {}, "sampling_params"), limits)
    rid = fields.pop("rid", None)
    if rid is None:
        rid = uuid.uuid4().hex
    elif not isinstance(rid, str) or not rid:
        raise RequestError(f"rid = {rid!r}: give a string that is not empty, or leave it out")
    stream = _boolean(fields.pop("stream", False), "stream")
    return_logprob = _boolean(fields.pop("return_logprob", False), "return_logprob")
    _refuse_rest(fields, UNSET_FIELDS, "")
    limit = min(params.max_new_tokens, limits.max_context - len(prompt_ids))
    return Generation(rid, prompt_ids, params, limit, stream, return_logprob)


def _prompt(ids: Any, limits: Limits) -> list[int]:
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise RequestError("input_ids: give the prompt as a list of token ids")
    if not ids:
        raise RequestError("input_ids is empty: a prompt has at least one token")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        at = next(i for i, one in enumerate(ids) if not 0 <= one < limits.vocab_size)
        raise RequestError(f"input_ids[{at}] = {ids[at]} is not in the vocabulary of {limits.vocab_size}")
    if len(ids) >= limits.max_context:
        raise RequestError(
            f"input_ids has {len(ids)} tokens, which leaves no room in max_context = {limits.max_context}"
        )
    return ids


def _params(given: Mapping[str, Any], limits: Limits) -> SamplingParams:
    rest = dict(given)
    temperature = _number(rest, "temperature", 1.0)
    top_p = _number(rest, "top_p", 1.0)
    top_k = _integer(rest, "top_k", -1)
    max_new_tokens = _integer(rest, "max_new_tokens", 128)
    seed = rest.pop("sampling_seed", None)
    ignore_eos = _boolean(rest.pop("ignore_eos", False), "sampling_params.ignore_eos")
    skip = _boolean(rest.pop("skip_special_tokens", True), "sampling_params.skip_special_tokens")
    stop = _stop(rest.pop("stop", None), limits)
    stop_ids = _stop_ids(rest.pop("stop_token_ids", None))
    if temperature < 0:
        raise _refusal("temperature", temperature, "it is at least 0")
    if not 0 < top_p <= 1:
        raise _refusal("top_p", top_p, "it is more than 0 and at most 1")
    if max_new_tokens < 1:
        raise _refusal("max_new_tokens", max_new_tokens, "it is at least 1")
    if seed is not None and type(seed) is not int:
        raise _refusal("sampling_seed", seed, "it is an integer")
    _refuse_rest(rest, UNSET_PARAMS, "sampling_params.")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_ids=frozenset() if ignore_eos else limits.eos_ids | stop_ids,
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
        skip_special_tokens=skip,
    )


def _stop(value: Any, limits: Limits) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise _refusal("stop", value, "it is a list of strings that are not empty")
    if strings and not limits.has_tokenizer:
        raise _refusal("stop", value, "this model directory has no tokenizer to find strings with")
    return tuple(strings)


def _stop_ids(value: Any) -> frozenset[int]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise _refusal("stop_token_ids", value, "it is a list of token ids")
    return frozenset(ids)


def _number(rest: dict[str, Any], name: str, default: float) -> float:
    value = rest.pop(name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refusal(name, value, "it is a number")
    return float(value)


def _integer(rest: dict[str, Any], name: str, default: int) -> int:
    value = rest.pop(name, None)
    if value is None:
        return default
    if type(value) is not int or abs(value) >= 2**62:
        raise _refusal(name, value, "it is an integer")
    return value


def _boolean(value: Any, name: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{name} = {value!r}: it is true or false")
    return value


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is not a JSON object")
    return value


def _refuse_rest(rest: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    for name, value in rest.items():
        if name not in neutral:
            raise RequestError(f"{prefix}{name} is not a parameter that this engine knows")
        if value not in neutral[name]:
            raise RequestError(f"{prefix}{name} = {value!r} is not supported by this engine; leave it out")


def _refusal(name: str, value: Any, rule: str) -> RequestError:
    return RequestError(f"sampling_params.{name} = {value!r}: {rule}")
