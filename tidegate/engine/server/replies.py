"""Replies in the shape of SGLang's `/generate`."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tidegate.engine.requests.request import Generation


def reply(generation: Generation, count: int, text: str, version: str) -> dict[str, Any]:
    """Returns the reply with the first `count` output tokens; `version` is the live weights' label.

    `weight_versions` covers the output exactly and is present once the request has ended, as in SGLang.
    `kv_version` is present only if keys and values of older weights were kept. With a grammar,
    `output_token_choices` is the number of ids that the grammar allowed for each token: 1 if the token was
    forced, and its logprob is then 0. `output_token_masses` is the total probability of these ids before the
    grammar excluded the others: 1 if the grammar changed nothing.
    """
    meta: dict[str, Any] = {
        "id": generation.rid,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt_ids),
        "completion_tokens": count,
        "cached_tokens": generation.cached_tokens,
        "weight_version": version,
    }
    if generation.return_logprob:
        pairs = zip(generation.logprobs[:count], generation.output_ids, itertools.repeat(None), strict=False)
        meta["output_token_logprobs"] = list(pairs)
    if generation.grammar is not None:
        meta["output_token_choices"] = generation.grammar.choices[:count]
        meta["output_token_masses"] = generation.grammar.masses[:count]
    if generation.ended:
        meta["weight_version"] = generation.spans[-1][0] if generation.spans else version
        meta["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in generation.spans]
        meta["e2e_latency"] = time.monotonic() - generation.started
    if generation.kv_version is not None:
        meta["kv_version"] = generation.kv_version
    return {"text": text, "output_ids": generation.output_ids[:count], "meta_info": meta}
