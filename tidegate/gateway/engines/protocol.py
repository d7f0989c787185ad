"""The engine's wire protocol (SGLang's `/generate`): requests, replies, and results over several calls.

Missing values of a reply are never invented: a token without a logprob is an error, and a version that is not
a number is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tidegate.errors import EngineError
from tidegate.gateway.engines.reply_lists import MASS_TOLERANCE, TopRow, read_experts, read_kept, read_top
from tidegate.gateway.sampling import continued_seed
from tidegate.turn import Ids, VersionSpan, spans_within
from tidegate.weights.adapter_files import requested_adapter

NON_RESUMABLE_PARAMS = frozenset(
    {"json_schema", "frequency_penalty", "presence_penalty", "repetition_penalty"}
)
"""Sampling parameters that depend on the whole reply; an engine sees only the tokens of one call."""


class RequestRefusedError(EngineError):
    """A healthy engine refused a request; `reason` is its message."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"{engine} refused the request: {reason}")
        self.reason = reason


class SlowEnginesError(EngineError):
    """The deadline passed while engines served the call or earlier ones; the message tells their load."""


@dataclass(slots=True)
class GenerateRequest:
    """A generation request: prompt ids (shape [prompt]), sampling parameters and token limit.

    `new_stop_search()` returns a function that is called with all ids of the reply so far, and returns their
    number up to the end of the first stop string, None without one. It is None if the request has no stop
    strings. An engine gets them as `params["stop"]` and searches the tokens of one call, reasoning included;
    without that parameter only the gateway searches.
    """

    prompt: Ids
    params: dict[str, Any]
    max_new_tokens: int
    _: KW_ONLY
    stream: bool = False
    requested_as: Mapping[str, str] = field(default_factory=dict)
    """For each of `params` that the agent set, its name in the agent's request."""
    new_stop_search: Callable[[], Callable[[Sequence[int]], int | None]] | None = None
    top_logprobs: int = 0
    """Number of likeliest ids that are requested in place of each token."""
    sampling_mask: bool = False
    """Whether the ids that top-p, top-k and min-p keep are requested, and logprobs among them."""
    experts_start: int | None = None
    """Index of the prompt's token from which on the experts of tokens are requested; None: they are not."""
    adapter: str = ""
    """Name of the LoRA adapter; empty: that which the engine serves without a name, or none."""
    closed: bool = False
    """The client closed the stream; the tokens so far are the reply."""
    on_close: Callable[[], None] = lambda: None
    """Ends the generation; set by the pool."""
    load: Callable[[], str | None] = lambda: None
    """Describes the load of the engines while the call waits for them; None if they are lost."""
    abort: Callable[[], None] | None = None
    """Aborts the running engine call; None while there is none."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_close()

    @property
    def resumable(self) -> bool:
        """Whether a further call can continue the reply: engines restart grammars and penalty counts with
        each call."""
        return not (self.params.keys() & NON_RESUMABLE_PARAMS)

    def has_experts(self, result: GenerateResult) -> bool:
        """Whether each token but the last has its experts, if they are requested."""
        routed = self.routed(result)
        return routed is None or routed <= 0 or not result.ids

    def routed(self, result: GenerateResult) -> int | None:
        """Number of tokens, but the last, whose experts are to come; None if none are requested."""
        if self.experts_start is None:
            return None
        return len(self.prompt) + len(result.ids) - 1 - _next_expert(self, result)

    def has_logprobs(self, result: GenerateResult) -> bool:
        """Whether each token has its logprob and, if requested, its likeliest and its kept ids."""
        top = len(result.top) if self.top_logprobs else len(result.ids)
        kept = len(result.kept) if self.sampling_mask else len(result.ids)
        return len(result.logprobs) == top == kept == len(result.ids)

    def unseen_stop_search(self, ids: Sequence[int]) -> Callable[[Sequence[int]], int | None] | None:
        """Returns a search for stop strings that the engine does not find in the call after the tokens `ids`:
        they straddle two calls, or the engine does not know them. None if it finds all of them."""
        if self.new_stop_search is None or (not ids and "stop" in self.params):
            return None
        return self.new_stop_search()

    def should_stream(self, result: GenerateResult) -> bool:
        """Whether to stream the next call: only a stream can be stopped in time."""
        return self.stream or self.unseen_stop_search(result.ids) is not None

    def complete(self, result: GenerateResult) -> bool:
        """Whether the reply is complete; truncates it at a stop string that no engine found."""
        search = self.unseen_stop_search(result.ids if result.calls > 1 else [])
        end = search(result.ids) if search is not None else None
        if end is not None:
            result.truncate(end)
            result.finish = "stop"
        elif result.finish not in ("stop", "length") and len(result.ids) >= self.max_new_tokens:
            result.finish = "length"
        return result.finish in ("stop", "length")


@dataclass(slots=True)
class GenerateResult:
    """The tokens sampled so far, from one or several engine calls."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    kv_version: int | None = None
    """Oldest policy version of the KV cache entries kept across a publish; None without any."""
    masses: list[float] = field(default_factory=list)
    """For each token of a reply under a grammar, the policy's probability mass on the ids that the grammar
    allowed. Empty if the engine does not report it."""
    _: KW_ONLY
    top: list[TopRow] = field(default_factory=list, compare=False)
    """The engine's likeliest ids in place of each token, if they were requested."""
    kept: list[Ids] = field(default_factory=list, compare=False)
    """The ids that top-p, top-k and min-p kept in place of each token, if they were requested."""
    experts: npt.NDArray[np.uint16] | None = field(default=None, compare=False)
    """The experts of the tokens from `GenerateRequest.experts_start` on, [tokens, layers · k]."""
    calls: int = field(default=0, compare=False)
    """Engine calls that returned tokens."""

    def truncate(self, end: int) -> None:
        del self.ids[end:], self.logprobs[end:], self.masses[end:], self.top[end:], self.kept[end:]
        self.spans = spans_within(self.spans, 0, end)

    def note_kept_kv(self, oldest: int | None) -> None:
        """Sets `kv_version` if tokens are of a later version than `oldest`, from which version on the engine
        computed the keys and values; None: it is unknown, and so is the version of the tokens."""
        if oldest is None:
            self.spans = []
        elif self.kv_version is None and any(span.version > oldest for span in self.spans):
            self.kv_version = oldest

    def extend(self, piece: GenerateResult) -> None:
        """Append the result of a further engine call; merges adjacent spans of the same version."""
        offset = len(self.ids)
        self.calls += bool(piece.ids)
        if not self.ids:
            self.cached_tokens = piece.cached_tokens
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.masses += piece.masses
        self.top += piece.top
        self.kept += piece.kept
        if piece.experts is not None:
            parts = [part for part in (self.experts, piece.experts) if part is not None]
            if len({part.shape[1] for part in parts}) > 1:
                raise EngineError(
                    f"the engines returned {parts[0].shape[1]} and {parts[1].shape[1]} experts of a token "
                    "for one reply: they must serve the same model"
                )
            self.experts = np.concatenate(parts)
        self.finish = piece.finish
        if piece.kv_version is not None:
            own = self.kv_version
            self.kv_version = piece.kv_version if own is None else min(own, piece.kv_version)
        for version, start, end in piece.spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.version == version and last.end == start + offset:
                self.spans[-1] = VersionSpan(version, last.start, end + offset)
            else:
                self.spans.append(VersionSpan(version, start + offset, end + offset))


def trainable_tokens(result: GenerateResult) -> npt.NDArray[np.uint8]:
    """Mask of the tokens of a reply under a grammar that may be trained on; shape [output]. True where the
    grammar masked no probability mass: there the recorded logprob is that of the policy's own distribution,
    which the trainer computes."""
    if len(result.masses) != len(result.ids):
        return np.zeros(len(result.ids), np.uint8)
    return (np.asarray(result.masses) >= 1 - MASS_TOLERANCE).astype(np.uint8)


def request_body(
    request: GenerateRequest,
    result: GenerateResult,
    rid: str,
    oldest_kv: int | None = None,
    adapter: str | None = None,
) -> bytes:
    """Return the JSON body of a `/generate` call that continues after the tokens in `result`. Engines seed
    each draw by seed and output position, so a continuation needs a seed of its own: with the same seed it
    would repeat the first draws. With `oldest_kv` the engine reuses keys and values only of calls with the
    same value. `adapter` is the engine's label, if requests must name its LoRA adapters."""
    prompt = request.prompt
    params = {**request.params, "max_new_tokens": request.max_new_tokens - len(result.ids)}
    if result.ids:
        prompt = np.concatenate((prompt, np.asarray(result.ids, dtype=np.int32)))
        if "sampling_seed" in params:
            params["sampling_seed"] = continued_seed(params["sampling_seed"], len(result.ids))
    body = {
        "input_ids": np.ascontiguousarray(prompt),
        "sampling_params": params,
        "return_logprob": True,
        "stream": request.should_stream(result),
        "rid": rid,
    }
    if (name := requested_adapter(adapter, request.adapter)) is not None:
        body["lora_path"] = name
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    if request.sampling_mask:
        body["return_sampling_mask"] = True
    if oldest_kv is not None:
        body["cache_salt"] = str(oldest_kv)
    if request.experts_start is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = _next_expert(request, result)
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _next_expert(request: GenerateRequest, result: GenerateResult) -> int:
    """Index of the token from which on experts are requested by the call that continues after `result`."""
    assert request.experts_start is not None
    return request.experts_start + (0 if result.experts is None else len(result.experts))


def read_reply(
    payload: Any,
    *,
    partial: bool = False,
    top_logprobs: int = 0,
    sampling_mask: bool = False,
    routed: int | None = None,
) -> GenerateResult:
    """Parse a `/generate` reply, or (`partial`) a cumulative event of its stream. `finish` is "" until the
    last event; earlier events may omit logprobs, and likeliest and kept ids are read from the last one alone,
    as are experts: of `routed` tokens before the reply, unless it is None, and of all of the reply but the
    last. With kept ids, logprobs are those of the distribution over them. Raises EngineError if ids or
    logprobs are missing or inconsistent, RequestRefusedError if the engine aborted the request with a 4xx
    status."""
    meta = payload.get("meta_info") if isinstance(payload, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"the engine's reply has no meta_info: {str(payload)[:200]}")
    ids = payload.get("output_ids")
    pairs = meta.get("output_token_logprobs")
    finish = _finish(meta.get("finish_reason"))
    if finish == "abort" and not ids:
        return GenerateResult(finish=finish)  # aborted before the first token: both lists may be absent
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise EngineError("the engine returned no output_ids")
    if not finish and not partial:
        raise EngineError("the engine returned no finish_reason")
    if not finish and not pairs:
        return GenerateResult(ids)
    if not isinstance(pairs, list) or (ids and not pairs):
        raise EngineError("the engine returned no logprobs; it must honour return_logprob")
    result = GenerateResult(ids, _logprobs(pairs, ids), _spans(meta.get("weight_versions"), len(ids)), finish)
    if top_logprobs and finish and ids:
        result.top = read_top(meta.get("output_top_logprobs"), ids, result.logprobs, top_logprobs)
    if sampling_mask and finish and ids:
        result.kept, result.logprobs, result.top = read_kept(meta, ids, result.logprobs, result.top)
    if routed is not None and finish and ids:
        result.experts = read_experts(meta.get("routed_experts"), routed + len(ids), finish)
    masses = meta.get("output_token_masses")
    if isinstance(masses, list) and all(isinstance(mass, float | int) for mass in masses):
        result.masses = masses[: len(ids)]
    cached = meta.get("cached_tokens")
    result.cached_tokens = cached if type(cached) is int else 0
    if meta.get("kv_version") is not None:
        result.kv_version = read_version(meta["kv_version"])
        if result.kv_version is None:
            result.spans = []  # the version of tokens from KV entries of unknown age is unknown
    return result


def reply_reader(request: GenerateRequest, result: GenerateResult) -> Callable[..., GenerateResult]:
    """Returns `read_reply` for the call that continues after `result`."""
    return partial(
        read_reply,
        top_logprobs=request.top_logprobs,
        sampling_mask=request.sampling_mask,
        routed=request.routed(result),
    )


def _logprobs(pairs: list[Any], ids: list[int]) -> list[float]:
    try:
        values = [float(pair[0]) for pair in pairs]
        logprob_ids = [pair[1] for pair in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        raise EngineError("the engine returned no logprobs for some tokens") from None
    if logprob_ids != ids:
        raise EngineError(f"the engine returned logprobs of {len(pairs)} tokens that are not its output_ids")
    if not all(map(math.isfinite, values)):
        raise EngineError("the engine returned no logprobs for some tokens: a value is not finite")
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
    """The well-formed spans; tokens outside them have no known version."""
    spans = []
    for span in wire if isinstance(wire, list) else ():
        version = read_version(span.get("version")) if isinstance(span, dict) else None
        if version is None or type(span.get("start")) is not int or type(span.get("end")) is not int:
            continue
        if 0 <= span["start"] < span["end"] <= length:
            spans.append(VersionSpan(version, span["start"], span["end"]))
    return spans


def read_version(value: Any) -> int | None:
    """Parse a policy version: a decimal integer, as text on the wire; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    return value if type(value) is int and value >= 0 else None
