"""The engine's wire protocol (SGLang's `/generate`), read strictly.

What an engine does not attest is not made up: a token without a logprob is an error, a version that is
not a number is no version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tidegate.errors import EngineError
from tidegate.gateway.seeds import continued_seed
from tidegate.types import Ids, VersionSpan, spans_within

WHOLE_CALL_PARAMS = frozenset({"json_schema", "frequency_penalty", "presence_penalty", "repetition_penalty"})
"""Sampling parameters that look at all of a reply, of which an engine sees only what one call samples."""


FREE_WITHIN = 1e-4
"""So much probability a grammar may take away from a token's distribution that still counts as the policy's
own: recorded logprobs then differ by as much."""


class RequestRefusedError(EngineError):
    """The engine will not do what was asked, and is well; `reason` is in its words."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"{engine} refused the request: {reason}")
        self.reason = reason


@dataclass(slots=True)
class GenerateRequest:
    """What is to be sampled: a prompt (shape [prompt]), how, and at most how much.

    `stop_after(ids)` says how many of a reply's ids there are up to the end of its first stop string,
    None where there is none. Engines look for stop strings themselves, but only in what one call samples.
    """

    prompt: Ids
    params: dict[str, Any]
    max_new_tokens: int
    stream: bool = False
    asked: Mapping[str, str] = field(default_factory=dict)
    """Which of `params` the agent asked for, and what it calls them."""
    stop_after: Callable[[Sequence[int]], int | None] = lambda ids: None
    closed: bool = False
    """The client closed the stream: what was sampled until then is the reply."""
    on_close: Callable[[], None] = lambda: None
    """Ends the sampling; set by the pool."""
    abort: Callable[[], None] | None = None
    """Aborts the engine call under way; None while there is none."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_close()

    @property
    def resumable(self) -> bool:
        """Whether a reply can go on from its tokens so far in a further call: engines begin a grammar, and
        the counts that penalties go by, anew with each call."""
        return not (self.params.keys() & WHOLE_CALL_PARAMS)

    def streams(self, sampled: GenerateResult) -> bool:
        """Whether the next call is streamed: also where a stop string may straddle two calls, for only
        what is seen as it comes can be ended in time."""
        return self.stream or bool(sampled.ids and self.params.get("stop"))

    def settle(self, sampled: GenerateResult) -> bool:
        """Whether the reply is over after one more call; its end is found where engines cannot see it."""
        end = self.stop_after(sampled.ids) if sampled.calls > 1 else None
        if end is not None:
            sampled.cut(end)
            sampled.finish = "stop"
        elif sampled.finish not in ("stop", "length") and len(sampled.ids) >= self.max_new_tokens:
            sampled.finish = "length"
        return sampled.finish in ("stop", "length")


@dataclass(slots=True)
class GenerateResult:
    """What was sampled so far; several engine calls may have gone into it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    kv_version: int | None = None
    """The oldest version among keys and values that were kept across a publish; None: there are none."""
    masses: list[float] = field(default_factory=list)
    """For each token of a reply under a grammar: the policy's own probability of the ids that the grammar
    allowed. Empty where the engine does not report it."""
    calls: int = field(default=0, compare=False)
    """Engine calls that gave tokens."""

    def cut(self, end: int) -> None:
        """Keep the first `end` tokens."""
        del self.ids[end:], self.logprobs[end:], self.masses[end:]
        self.spans = spans_within(self.spans, 0, end)

    def extend(self, piece: GenerateResult) -> None:
        """Add what one more engine call gave; neighbouring spans of one version become one."""
        offset = len(self.ids)
        self.calls += bool(piece.ids)
        if not self.ids:
            self.cached_tokens = piece.cached_tokens
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.masses += piece.masses
        self.finish = piece.finish
        if piece.kv_version is not None:
            known = self.kv_version
            self.kv_version = piece.kv_version if known is None else min(known, piece.kv_version)
        for version, start, end in piece.spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.version == version and last.end == start + offset:
                self.spans[-1] = VersionSpan(version, last.start, end + offset)
            else:
                self.spans.append(VersionSpan(version, start + offset, end + offset))


def trainable_tokens(sampled: GenerateResult) -> npt.NDArray[np.uint8]:
    """Which tokens of a reply under a grammar may be trained on, [output]: those where the grammar took no
    probability from any id that the policy would have drawn.

    There the recorded logprob is that of the policy's own distribution, which the trainer forms. Elsewhere
    tokens were drawn from another one.
    """
    if len(sampled.masses) != len(sampled.ids):
        return np.zeros(len(sampled.ids), np.uint8)
    return (np.asarray(sampled.masses) >= 1 - FREE_WITHIN).astype(np.uint8)


def request_body(order: GenerateRequest, sampled: GenerateResult, rid: str) -> bytes:
    """The JSON of one `/generate` call; it continues after the tokens that were sampled already.

    Engines draw by seed and position in what they sample, so a continuation has a seed of its own: with
    the same one it would draw the first numbers again.
    """
    prompt = order.prompt
    params = {**order.params, "max_new_tokens": order.max_new_tokens - len(sampled.ids)}
    if sampled.ids:
        prompt = np.concatenate((prompt, np.asarray(sampled.ids, dtype=np.int32)))
        if "sampling_seed" in params:
            params["sampling_seed"] = continued_seed(params["sampling_seed"], len(sampled.ids))
    body = {
        "input_ids": np.ascontiguousarray(prompt),
        "sampling_params": params,
        "return_logprob": True,
        "stream": order.streams(sampled),
        "rid": rid,
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def read_reply(payload: Any, *, partial: bool = False) -> GenerateResult:
    """One `/generate` reply, or (`partial`) one cumulative event of its stream.

    `finish` is "" until the last event; until then a stream may leave logprobs out.
    Raises EngineError where ids or logprobs are missing or don't fit each other, or where the engine
    aborted the request because of the request itself.
    """
    meta = payload.get("meta_info") if isinstance(payload, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"the engine's reply has no meta_info: {str(payload)[:200]}")
    ids = payload.get("output_ids")
    pairs = meta.get("output_token_logprobs")
    finish = _finish(meta.get("finish_reason"))
    if finish == "abort" and not ids:
        return GenerateResult(finish=finish)  # ended before its first token: there may be neither list
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise EngineError("the engine returned no output_ids")
    if not finish and not partial:
        raise EngineError("the engine returned no finish_reason")
    if not finish and not pairs:
        return GenerateResult(ids)
    if not isinstance(pairs, list) or (ids and not pairs):
        raise EngineError("the engine returned no logprobs; it must honour return_logprob")
    sampled = GenerateResult(
        ids, _logprobs(pairs, ids), _spans(meta.get("weight_versions"), len(ids)), finish
    )
    masses = meta.get("output_token_masses")
    if isinstance(masses, list) and all(isinstance(one, float | int) for one in masses):
        sampled.masses = masses[: len(ids)]
    cached = meta.get("cached_tokens")
    sampled.cached_tokens = cached if type(cached) is int else 0
    if meta.get("kv_version") is not None:
        sampled.kv_version = read_version(meta["kv_version"])
        if sampled.kv_version is None:
            sampled.spans = []  # tokens that come from keys and values of unknown age are of unknown age
    return sampled


def _logprobs(pairs: list[Any], ids: list[int]) -> list[float]:
    try:
        values = [float(pair[0]) for pair in pairs]
        told = [pair[1] for pair in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        raise EngineError("the engine returned no logprobs for some tokens") from None
    if told != ids:
        raise EngineError(f"the engine returned logprobs of {len(told)} tokens that are not its output_ids")
    if not all(map(math.isfinite, values)):
        raise EngineError("the engine returned no logprobs for some tokens: not a finite number")
    return values


def _finish(reason: Any) -> str:
    if reason is None:
        return ""
    if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length", "abort"):
        raise EngineError(f"the engine returned an unknown finish_reason: {str(reason)[:200]}")
    status = reason.get("status_code")
    if reason["type"] == "abort" and isinstance(status, int) and 400 <= status < 500:
        raise RequestRefusedError("the engine", str(reason.get("message")))
    kind: str = reason["type"]
    return kind


def _spans(wire: Any, length: int) -> list[VersionSpan]:
    """The spans that are well formed; what is left uncovered has no known version."""
    spans = []
    for one in wire if isinstance(wire, list) else ():
        version = read_version(one.get("version")) if isinstance(one, dict) else None
        if version is None or type(one.get("start")) is not int or type(one.get("end")) is not int:
            continue
        if 0 <= one["start"] < one["end"] <= length:
            spans.append(VersionSpan(version, one["start"], one["end"]))
    return spans


def read_version(value: Any) -> int | None:
    """A policy version: a decimal integer, on the wire as text. Anything else is unknown."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    return value if type(value) is int and value >= 0 else None
