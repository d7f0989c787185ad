"""Reads an engine's replies to `/generate`, strictly.

Missing values are never invented: a token without a logprob is an error, and a version that is not a number
is unknown.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.errors import EngineError
from tidegate.gateway.engines.protocol import (
    MASS_TOLERANCE,
    GenerateRequest,
    GenerateResult,
    RequestRefusedError,
    TopRow,
)
from tidegate.turn import VersionSpan
from tidegate.types import LISTED

LEAST_LOGPROB = -9999.0
"""Smallest logprob of a listed id, which half precision can hold."""


TOP_TOLERANCE = 0.01
"""Largest difference between the logprob of a sampled token and that of the same id among the likeliest."""


MAX_EXPERT = 2**16 - 1


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
        result.top = _top(meta.get("output_top_logprobs"), result, top_logprobs)
    if sampling_mask and finish and ids:
        _narrow(result, meta)
    if routed is not None and finish and ids:
        result.experts = _experts(meta.get("routed_experts"), routed + len(ids), finish)
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


def _top(rows: Any, result: GenerateResult, most: int) -> list[TopRow]:
    """The likeliest ids of each token; k is `most` or the size of the vocabulary.

    A sampled id must have its logprob there too, or be less likely than the others: logprobs of another
    distribution, such as before the temperature, are refused.
    """
    count = len(result.ids)
    if isinstance(rows, str):
        rows = _unpacked(rows, count)
    packed = isinstance(rows, np.ndarray)
    if not (rows.size if packed else isinstance(rows, list) and len(rows) == count and all(rows)):
        raise EngineError(
            f"the engine returned no likeliest ids for some of {count} tokens: trainer.loss.score_centering "
            f"needs an engine that honours top_logprobs_num = {most}; use one, or set it to 0"
        )
    try:
        if packed:
            values, ids = rows["logprob"][:, :most], rows["id"][:, :most]
        else:
            values = np.array([[pair[0] for pair in row[:most]] for row in rows], np.float32)
            ids = np.array([[pair[1] for pair in row[:most]] for row in rows], np.int32)
        if np.isnan(values).any() or (np.diff(values) > 0).any():
            raise ValueError
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        raise EngineError(
            f"the engine returned malformed output_top_logprobs for {count} tokens: each needs as many "
            "entries of logprob and id, likeliest first"
        ) from None
    own = np.asarray(result.logprobs, np.float32)
    among = ids == np.asarray(result.ids, np.int32)[:, None]
    gaps = np.where(
        among.any(axis=1),
        np.abs(np.where(among, values - own[:, None], 0.0).sum(axis=1)),
        own - values[:, -1],
    )
    if gaps.max() > TOP_TOLERANCE:
        at = int(gaps.argmax())
        raise EngineError(
            f"the engine returned likeliest ids of another distribution than it sampled from: the logprob "
            f"{own[at]:.4g} of the sampled id {result.ids[at]} differs from the list by {gaps[at]:.2g}; it "
            "must report logprobs after the temperature"
        )
    return list(zip(ids, np.maximum(values, LEAST_LOGPROB), strict=True))


def _unpacked(text: str, count: int) -> npt.NDArray[np.void] | None:
    """The ids in the form that PACKED_LISTS accepts, [count, k]; None if they are not of so many tokens."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), LISTED).reshape(count, -1)
    except ValueError:
        return None


def _narrow(result: GenerateResult, meta: Mapping[str, Any]) -> None:
    """Sets `kept`, and replaces the logprobs over the whole vocabulary by those over the kept ids, which the
    token was drawn from. Likeliest ids that were not kept get LEAST_LOGPROB."""
    rows, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    count = len(result.ids)
    if not all(isinstance(found, list) and len(found) == count for found in (rows, logprobs)):
        raise EngineError(
            f"the engine returned no kept ids for some of {count} tokens: in training, top_p, top_k and "
            "min_p need an engine that honours return_sampling_mask; use one, or leave out sampling.top_p"
        )
    try:
        kept = [np.array(row, np.int32).reshape(-1) for row in rows or ()]
        narrowed = np.array(logprobs, np.float64).reshape(count)
    except (TypeError, ValueError, OverflowError):
        raise EngineError(
            "the engine returned malformed kept ids or logprobs (return_sampling_mask)"
        ) from None
    gains = narrowed - np.asarray(result.logprobs)
    for token, ids, logprob, gain in zip(result.ids, kept, narrowed, gains, strict=True):
        if token not in ids or not logprob <= MASS_TOLERANCE or not gain >= -TOP_TOLERANCE:
            raise EngineError(
                f"the engine returned kept ids that contradict its sample: id {token} is "
                f"{'' if token in ids else 'not '}among {len(ids)} kept ids, and its logprob is "
                f"{logprob:.4g} among them and {logprob - gain:.4g} among all"
            )
    result.kept, result.logprobs = kept, narrowed.tolist()
    result.top = [
        (ids, np.where(np.isin(ids, own), values + np.float32(gain), np.float32(LEAST_LOGPROB)))
        for (ids, values), own, gain in zip(result.top, kept, gains, strict=False)
    ]


def _experts(text: Any, rows: int, finish: str) -> npt.NDArray[np.uint16] | None:
    """The experts of `rows` tokens, [rows, layers · k]; an aborted reply may have none."""
    if text is None and finish == "abort":
        return None
    try:
        ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        width, rest = divmod(len(ids), rows)
        if rest or not width or ids.min() < 0 or ids.max() > MAX_EXPERT:
            raise ValueError
    except (TypeError, ValueError):
        size = len(text) if isinstance(text, str) else "no"
        raise EngineError(
            f"the engine returned {size} characters of routed_experts, not the experts of {rows} tokens: "
            "trainer.routing_replay needs an engine that honours return_routed_experts, such as SGLang with "
            "--enable-return-routed-experts"
        ) from None
    return ids.reshape(rows, width).astype(np.uint16)


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
