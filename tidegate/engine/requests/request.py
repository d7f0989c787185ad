"""Parses and validates `/generate` requests; defines the engine's request object."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.engine.requests.grammar import Grammar
from tidegate.engine.requests.params import SamplingParams, TokenLimits, read_params
from tidegate.engine.validation import RequestError, boolean, integer, mapping, refuse_unsupported
from tidegate.settings.servers import GREEDY_BELOW

BLOCK = 16
"""Tokens per block of a sequence, which prefixes are matched by."""
UNSET_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("text", "image_data", "audio_data", "video_data", "input_embeds"), (None,)),
    **dict.fromkeys(("token_ids_logprob", "session_params", "custom_logit_processor"), (None,)),
    **dict.fromkeys(("return_text_in_logprobs", "return_hidden_states"), (None, False)),
    # Fields that SGLang's router adds.
    **dict.fromkeys(("background", "return_bytes", "return_entropy"), (None, False)),
    "model": (None,),
    "log_metrics": (None, True, False),
    "no_logs": (None, False, True),
}
"""Unsupported fields of SGLang's request, with their neutral values."""
TokenLogprob = tuple[float, int]
"""A logprob and the id that it belongs to, in SGLang's order."""

HEALTH_REQUEST = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
"""A request for one token, which shows that the engine is healthy."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of some tokens of a prompt, and for each the likeliest ids with theirs, likeliest first."""

    logprobs: list[float]
    top: list[list[TokenLogprob]]


class BlockHashes:
    """Block hashes of a sequence that only grows; computed once. Those of different adapters are disjoint."""

    __slots__ = ("_adapter", "hashes")

    def __init__(self, adapter: str = "") -> None:
        self.hashes: list[int] = []
        self._adapter = int.from_bytes(adapter.encode()) << 64  # above all bits of a hash

    def for_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Returns a hash for each whole block of `tokens`, over all tokens up to the end of the block."""
        hashes = self.hashes
        for start in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            parts = (hashes[-1] if hashes else 0, *tokens[start : start + BLOCK])
            hashes.append(self._adapter + hash(parts))
        return hashes[: len(tokens) // BLOCK]

    def with_rest(self, tokens: Sequence[int]) -> list[int]:
        """Returns `for_tokens`, and one more hash if tokens are left after the last whole block."""
        hashes = self.for_tokens(tokens)
        rest = tokens[len(hashes) * BLOCK :]
        parts = (hashes[-1] if hashes else 0, len(rest), *rest)
        return [*hashes, self._adapter + hash(parts)] if rest else hashes


@dataclass(slots=True, eq=False)
class Generation:
    """One request, written by the scheduler's thread and read by the event loop.

    `spans` are (version label, start, end) over output tokens. `kv_version` is the oldest version among the
    keys and values, set if they were kept during a weight update. `finish_reason` or `error` is set when the
    request ends.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    """Maximum number of output tokens: `max_new_tokens`, or fewer if the context is full earlier. 0: the
    request ends when the prompt's logprobs are known."""
    _: KW_ONLY
    stream: bool = False
    return_logprob: bool = False
    logprob_start: int | None = None
    """Index of the prompt's token from which on `prompt_logprobs` are computed; None: they are not."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Logprobs of the prompt's tokens after `logprob_start`, at temperature 1 as in SGLang."""
    top_logprobs: int = 0
    """Number of likeliest ids at each of these tokens and of the reply whose logprobs are requested, too."""
    prompt_top: list[list[TokenLogprob]] = field(default_factory=list)
    """These ids with their logprobs, likeliest first, for each of `prompt_logprobs`."""
    experts_start: int | None = None
    """Index of the prompt's token from which on the experts of tokens are returned; None: they are not."""
    experts: list[Any] = field(default_factory=list)
    """Arrays of these experts, [tokens, layers · k] each. Tokens whose keys and values were computed again
    keep those of the first time."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    output_top: list[npt.NDArray[np.void]] = field(default_factory=list)
    """The likeliest ids in place of each output token, if they were requested: those of the distribution that
    was sampled, likeliest first, as `LISTED`."""
    packed_lists: bool = False
    """Whether the client accepts them in base64 (`PACKED_LISTS`)."""
    sampling_mask: bool = False
    """Whether the ids that top-p, top-k and min-p kept are requested."""
    kept: list[list[int]] = field(default_factory=list)
    """These ids in place of each output token."""
    kept_logprobs: list[float] = field(default_factory=list)
    """Logprobs of the output tokens among them, of the distribution that was sampled."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    kv_version: str | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request first got a row."""
    grammar: Grammar | None = None
    """The compiled grammar of the reply, if it has one."""
    adapter: str = ""
    """Name of its LoRA adapter among those of the live version; empty: it has none, or the only one."""
    block_hashes: BlockHashes = field(default_factory=BlockHashes)
    finish_reason: dict[str, Any] | None = None
    error: str | None = None
    refused: bool = False
    """Whether the request itself caused the error (status 400)."""
    started: float = field(default_factory=time.monotonic)
    wake: asyncio.Event | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether a prefill must compute logprobs of the prompt."""
        if self.logprob_start is None:
            return False
        return len(self.prompt_logprobs) < len(self.prompt_ids) - 1 - self.logprob_start

    @property
    def prefill_kind(self) -> tuple[bool, int, bool]:
        """Whether its prefill computes logprobs, of how many likeliest ids, and whether it ends with it.

        Equal in each prefill pass.
        """
        scored = self.needs_prompt_logprobs
        return scored, self.top_logprobs if scored else 0, self.limit == 0

    @property
    def reusable(self) -> list[int]:
        """The tokens of `past` whose keys and values may come from the prefix cache."""
        return self.past[: self.logprob_start] if self.needs_prompt_logprobs else self.past

    @property
    def past(self) -> list[int]:
        """All tokens but the last, which is the input of the next step."""
        return (self.prompt_ids + self.output_ids)[:-1]

    def close_span(self, version: str) -> None:
        """Attributes the output tokens since the last span to `version`."""
        start = self.spans[-1][2] if self.spans else 0
        end = len(self.output_ids)
        if end == start:
            return
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], end)
        else:
            self.spans.append((version, start, end))


def parse_generate(body: Any, limits: TokenLimits) -> Generation:
    fields = dict(mapping(body, "the body"))
    params = read_params(mapping(fields.pop("sampling_params", None) or {}, "sampling_params"), limits)
    prompt_ids = _prompt(fields.pop("input_ids", None), limits, params.max_new_tokens)
    rid = fields.pop("rid", None)
    if rid is None:
        rid = uuid.uuid4().hex
    elif not isinstance(rid, str) or not rid:
        raise RequestError(f"rid = {rid!r}: it must be a non-empty string; give one or leave it out")
    adapter = fields.pop("lora_path", None) or ""
    if not isinstance(adapter, str):
        raise RequestError(f"lora_path = {adapter!r}: it must be the name of a LoRA adapter, or null")
    stream = boolean(fields, "stream", False, "")
    return_logprob = boolean(fields, "return_logprob", False, "")
    start = _logprob_start(fields, len(prompt_ids), return_logprob)
    top = _top_logprobs(fields, start, return_logprob, limits)
    sampling_mask = boolean(fields, "return_sampling_mask", False, "")
    if sampling_mask and not params.narrows:
        raise RequestError(
            "return_sampling_mask = true needs sampling_params that exclude ids: top_p < 1, top_k > 0 or "
            f"min_p > 0, at a temperature of at least {GREEDY_BELOW:g}"
        )
    experts_start = _experts_start(fields, len(prompt_ids))
    refuse_unsupported(fields, UNSET_FIELDS, "")
    limit = min(params.max_new_tokens, limits.max_context - len(prompt_ids))
    if limit == 0 and start is None:
        raise RequestError(
            "sampling_params.max_new_tokens = 0: it must be at least 1, unless logprob_start_len requests "
            "the prompt's logprobs"
        )
    if limit == 0 and experts_start is not None:
        raise RequestError(
            "return_routed_experts = true with sampling_params.max_new_tokens = 0: experts are returned with "
            "a reply; request at least 1 token"
        )
    return Generation(
        rid,
        prompt_ids,
        params,
        limit,
        stream=stream,
        return_logprob=return_logprob,
        logprob_start=start,
        top_logprobs=top,
        sampling_mask=sampling_mask,
        adapter=adapter,
        block_hashes=BlockHashes(adapter),
        experts_start=experts_start,
    )


def _experts_start(fields: dict[str, Any], prompt: int) -> int | None:
    """Returns `routed_experts_start_len` if `return_routed_experts` is set."""
    wanted = boolean(fields, "return_routed_experts", False, "")
    start = integer(fields, "routed_experts_start_len", 0, "")
    if not 0 <= start <= prompt:
        raise RequestError(
            f"routed_experts_start_len = {start}: it must be from 0 to {prompt}, the length of the prompt"
        )
    return start if wanted else None


def _logprob_start(fields: dict[str, Any], prompt: int, return_logprob: bool) -> int | None:
    """Returns `logprob_start_len`, or None for −1, which requests no logprobs of the prompt."""
    start = integer(fields, "logprob_start_len", -1, "")
    if start == -1:
        return None
    if not 0 <= start < prompt:
        raise RequestError(
            f"logprob_start_len = {start}: it must be the index of a token of the prompt, which has {prompt}"
        )
    if not return_logprob:
        raise RequestError(f"logprob_start_len = {start} has no effect without return_logprob = true")
    return start


def _top_logprobs(
    fields: dict[str, Any], start: int | None, return_logprob: bool, limits: TokenLimits
) -> int:
    """Returns `top_logprobs_num`, for a reply at most the size of the vocabulary."""
    top = integer(fields, "top_logprobs_num", 0, "")
    if top < 0 or (start is not None and top > limits.vocab_size):
        raise RequestError(
            f"top_logprobs_num = {top}: it must be from 0 to {limits.vocab_size}, the size of the vocabulary"
        )
    if top and not return_logprob:
        raise RequestError(f"top_logprobs_num = {top} has no effect without return_logprob = true")
    return min(top, limits.vocab_size)


def _prompt(ids: Any, limits: TokenLimits, max_new_tokens: int) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError("input_ids must be a list of token ids")
    if not ids:
        raise RequestError("input_ids is empty: a prompt needs at least one token")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        at = next(i for i, token in enumerate(ids) if not 0 <= token < limits.vocab_size)
        raise RequestError(f"input_ids[{at}] = {ids[at]} is not in the vocabulary of {limits.vocab_size}")
    if len(ids) + min(1, max_new_tokens) > limits.max_context:
        rule = "must be fewer than" if max_new_tokens else "must be at most"
        raise RequestError(
            f"input_ids has {len(ids)} tokens, which {rule} max_context = {limits.max_context}"
        )
    return ids


def samples_of(request: Generation) -> list[Generation]:
    """Returns `SamplingParams.n` requests for one reply each, with `_0`, `_1` … added to the id as in SGLang.

    Reply i equals that of a single request with the seed + i. With n = 1 the request itself is returned.
    """
    params = request.params
    if params.n == 1:
        return [request]
    return [
        Generation(
            rid=f"{request.rid}_{i}",
            prompt_ids=request.prompt_ids,
            params=replace(params, seed=(params.seed + i) % 2**64, n=1),
            limit=request.limit,
            stream=request.stream,
            return_logprob=request.return_logprob,
            logprob_start=request.logprob_start,
            top_logprobs=request.top_logprobs,
            sampling_mask=request.sampling_mask,
            packed_lists=request.packed_lists,
            experts_start=request.experts_start,
            grammar=request.grammar.copy() if request.grammar is not None else None,
            adapter=request.adapter,
            block_hashes=BlockHashes(request.adapter),
        )
        for i in range(params.n)
    ]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    directory: Path
    version: str | None
    keep_cache: bool
    abort_all: bool
