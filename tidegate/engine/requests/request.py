"""What `/generate` was asked for, checked; and a request as it lives in the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate.engine.requests.block_hashes import BlockHashes
from tidegate.engine.requests.grammar import Grammar
from tidegate.engine.requests.params import SamplingParams, TokenLimits, read_params
from tidegate.engine.validation import RequestError, boolean, mapping, refuse_rest

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
    grammar: Grammar | None = None
    """Where its reply is bound to one, compiled."""
    chain: BlockHashes = field(default_factory=BlockHashes)
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


def parse_generate(body: Any, limits: TokenLimits) -> Generation:
    """Check the body of `/generate`; raises RequestError that names what is wrong."""
    fields = dict(mapping(body, "the body"))
    prompt_ids = _prompt(fields.pop("input_ids", None), limits)
    params = read_params(mapping(fields.pop("sampling_params", None) or {}, "sampling_params"), limits)
    rid = fields.pop("rid", None)
    if rid is None:
        rid = uuid.uuid4().hex
    elif not isinstance(rid, str) or not rid:
        raise RequestError(f"rid = {rid!r}: give a string that is not empty, or leave it out")
    stream = boolean(fields, "stream", False, "")
    return_logprob = boolean(fields, "return_logprob", False, "")
    refuse_rest(fields, UNSET_FIELDS, "")
    limit = min(params.max_new_tokens, limits.max_context - len(prompt_ids))
    return Generation(rid, prompt_ids, params, limit, stream, return_logprob)


def _prompt(ids: Any, limits: TokenLimits) -> list[int]:
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


def samples_of(asked: Generation) -> list[Generation]:
    """The `params.n` requests of which each samples one reply; as in SGLang, `_0`, `_1` … are added to the
    request's id where there are several. The reply number i is that of the seed + i, asked for alone."""
    params = asked.params
    if params.n == 1:
        return [asked]
    return [
        Generation(
            rid=f"{asked.rid}_{i}",
            prompt_ids=asked.prompt_ids,
            params=replace(params, seed=(params.seed + i) % 2**64, n=1),
            limit=asked.limit,
            stream=asked.stream,
            return_logprob=asked.return_logprob,
            grammar=asked.grammar.copy() if asked.grammar is not None else None,
        )
        for i in range(params.n)
    ]
