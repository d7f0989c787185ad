"""Reads the lists that an engine's reply may have for each token: likeliest and kept ids, and experts."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.errors import EngineError
from tidegate.turn import Ids, Logprobs
from tidegate.types import LISTED

MASS_TOLERANCE = 1e-4
"""Probability mass that a grammar may mask while the token still counts as drawn from the policy; recorded
logprobs are off by at most this much."""
LEAST_LOGPROB = -9999.0
"""Smallest logprob of a listed id, which half precision can hold."""
TOP_TOLERANCE = 0.01
"""Largest difference between the logprob of a sampled token and that of the same id among the likeliest."""
MAX_EXPERT = 2**16 - 1
TopRow = tuple[Ids, Logprobs]
"""Likeliest ids and their logprobs, likeliest first; both [k]."""


def read_top(rows: Any, sampled: list[int], logprobs: list[float], most: int) -> list[TopRow]:
    """Reads the likeliest ids in place of each sampled one; k is `most` or the size of the vocabulary.

    A sampled id must have its logprob there too, or be less likely than the others: logprobs of another
    distribution, such as before the temperature, are refused.
    """
    count = len(sampled)
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
    own = np.asarray(logprobs, np.float32)
    among = ids == np.asarray(sampled, np.int32)[:, None]
    gaps = np.where(
        among.any(axis=1),
        np.abs(np.where(among, values - own[:, None], 0.0).sum(axis=1)),
        own - values[:, -1],
    )
    if gaps.max() > TOP_TOLERANCE:
        at = int(gaps.argmax())
        raise EngineError(
            f"the engine returned likeliest ids of another distribution than it sampled from: the logprob "
            f"{own[at]:.4g} of the sampled id {sampled[at]} differs from the list by {gaps[at]:.2g}; it "
            "must report logprobs after the temperature"
        )
    return list(zip(ids, np.maximum(values, LEAST_LOGPROB), strict=True))


def _unpacked(text: str, count: int) -> npt.NDArray[np.void] | None:
    """The ids in the form that PACKED_LISTS accepts, [count, k]; None if they are not of so many tokens."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), LISTED).reshape(count, -1)
    except ValueError:
        return None


def read_kept(
    meta: Mapping[str, Any], sampled: list[int], logprobs: list[float], top: list[TopRow]
) -> tuple[list[Ids], list[float], list[TopRow]]:
    """Reads the ids that top-p, top-k and min-p kept for each sampled id.

    Returns the kept ids, the logprobs of the sampled ids among these, and the likeliest ids with such
    logprobs; likeliest ids that were not kept get LEAST_LOGPROB.
    """
    rows, drawn = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    count = len(sampled)
    if not all(isinstance(found, list) and len(found) == count for found in (rows, drawn)):
        raise EngineError(
            f"the engine returned no kept ids for some of {count} tokens: in training, top_p, top_k and "
            "min_p need an engine that honours return_sampling_mask; use one, or leave out sampling.top_p"
        )
    try:
        kept = [np.array(row, np.int32).reshape(-1) for row in rows or ()]
        narrowed = np.array(drawn, np.float64).reshape(count)
    except (TypeError, ValueError, OverflowError):
        raise EngineError(
            "the engine returned malformed kept ids or logprobs (return_sampling_mask)"
        ) from None
    gains = narrowed - np.asarray(logprobs)
    for token, ids, logprob, gain in zip(sampled, kept, narrowed, gains, strict=True):
        if token not in ids or not logprob <= MASS_TOLERANCE or not gain >= -TOP_TOLERANCE:
            raise EngineError(
                f"the engine returned kept ids that contradict its sample: id {token} is "
                f"{'' if token in ids else 'not '}among {len(ids)} kept ids, and its logprob is "
                f"{logprob:.4g} among them and {logprob - gain:.4g} among all"
            )
    narrowed_top = [
        (ids, np.where(np.isin(ids, own), values + np.float32(gain), np.float32(LEAST_LOGPROB)))
        for (ids, values), own, gain in zip(top, kept, gains, strict=False)
    ]
    return kept, narrowed.tolist(), narrowed_top


def read_experts(text: Any, rows: int, finish: str) -> npt.NDArray[np.uint16] | None:
    """Reads the experts of `rows` tokens, [rows, layers · k]; an aborted reply may have none."""
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
