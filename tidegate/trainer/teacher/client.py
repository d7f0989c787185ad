"""Requests the logprobs of given tokens from engines, by SGLang's `/generate`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from tidegate.errors import EngineError
from tidegate.service.api_key import engine_key
from tidegate.service.http_client import HttpClient, engine_headers, error_in
from tidegate.turn import Logprobs

REFUSALS = (400, 404, 413, 422)
"""Statuses with which a healthy engine refuses a request."""
CLIPPED = 0
"""Id that SGLang reports in place of the last id of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Scores:
    """A teacher's logprobs of n tokens, and of the k likeliest ids in place of each."""

    logprobs: Logprobs
    """float32 [n]."""
    top_ids: npt.NDArray[np.int32] | None = None
    """[n, k]; None if they were not requested."""
    top_logprobs: Logprobs | None = None
    """float32 [n, k]."""


class ScoreClient(HttpClient):
    """Methods raise EngineError; `retryable` is False if the engine refused the request."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s

    async def score(self, url: str, ids: Sequence[int], start: int, top_k: int = 0) -> Scores:
        """Return the logprobs of the tokens after index `start`, each given all earlier ones.

        They are those of the distribution at temperature 1. With `top_k`, they include those of the likeliest
        ids in place of each token.
        """
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": start,
            **({"top_logprobs_num": top_k} if top_k else {}),
        }
        reply = await self._call("POST", f"{url}/generate", orjson.dumps(body))
        logprobs = np.array(read_logprobs(reply, ids[start:]), dtype=np.float32)
        return Scores(logprobs, *(read_top(reply, len(logprobs), top_k) if top_k else ()))

    async def info(self, url: str) -> Mapping[str, Any]:
        """Return the engine's `/model_info`."""
        info = await self._call("GET", f"{url}/model_info")
        if not isinstance(info, dict):
            raise EngineError(f"{url} answers /model_info with {str(info)[:200]}")
        return info

    async def _call(self, method: str, address: str, data: bytes | None = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        headers = engine_headers(address, engine_key())
        try:
            async with self.http.request(
                method, address, data=data, headers=headers, timeout=timeout
            ) as response:
                status, content = response.status, await response.read()
        except TimeoutError:
            why = f"{address} did not answer within {self._deadline_s:g} s"
            raise EngineError(why, retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{address}: {str(error) or type(error).__name__}", retryable=True) from None
        if status != 200:
            message = str(error_in(content).get("message") or content[:300].decode(errors="replace"))
            raise EngineError(f"{address}: HTTP {status}: {message}", retryable=status not in REFUSALS)
        try:
            # Not orjson: it refuses NaN, which `read_logprobs` reports by its name.
            return json.loads(content)
        except ValueError:
            raise EngineError(f"{address} returned invalid JSON: {content[:200]!r}", retryable=True) from None


def read_logprobs(reply: Any, ids: Sequence[int]) -> list[float]:
    """Return the logprobs of all `ids` but the first, of a reply whose prompt ends with them.

    Raises EngineError if a value is missing or not finite, or belongs to another token.
    """
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(entries, list) or len(entries) != len(ids):
        found = f"{len(entries)} logprobs" if isinstance(entries, list) else "no logprobs"
        raise EngineError(f"the teacher returned {found} for {len(ids)} tokens", retryable=True)
    try:
        tokens = [entry[1] for entry in entries]
        # SGLang gives the first token no logprob.
        values = [float(entry[0]) for entry in entries[1:]]
    except (TypeError, ValueError, IndexError, KeyError):
        raise EngineError("the teacher returned no logprob for some tokens", retryable=True) from None
    wrong = [pair for pair in zip(tokens, ids, strict=True) if pair[0] not in (pair[1], CLIPPED)]
    if wrong:
        raise EngineError(f"the teacher returned a logprob of token {wrong[0][0]} for token {wrong[0][1]}")
    if not all(map(math.isfinite, values)):
        raise EngineError("the teacher returned a logprob that is not finite", retryable=True)
    return values


def read_top(reply: Any, count: int, top_k: int) -> tuple[npt.NDArray[np.int32], Logprobs]:
    """Return the likeliest ids at the last `count` tokens of a reply's prompt, and their logprobs.

    Raises EngineError if some are missing or not finite.
    """
    entries = reply["meta_info"].get("input_top_logprobs")
    if not isinstance(entries, list) or len(entries) != count + 1:
        raise EngineError(
            f"the teacher returned no likeliest tokens for {count} tokens: it must support top_logprobs_num"
        )
    try:
        ids = np.array([[pair[1] for pair in row] for row in entries[1:]], dtype=np.int32)
        logprobs = np.array([[pair[0] for pair in row] for row in entries[1:]], dtype=np.float32)
    except (TypeError, ValueError, IndexError):
        raise EngineError(
            "the teacher returned no likeliest tokens for some tokens", retryable=True
        ) from None
    if ids.shape != (count, top_k):
        raise EngineError(
            f"the teacher returned {list(ids.shape)} likeliest tokens in place of {[count, top_k]}"
        )
    if not np.isfinite(logprobs).all():
        raise EngineError("the teacher returned a logprob that is not finite", retryable=True)
    return ids, logprobs
