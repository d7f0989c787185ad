"""Converts requests from SGLang's protocol to vLLM's, and replies back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tidegate.engine.requests.request import Generation, TokenLogprob
from tidegate.engine.validation import PARAMS, RequestError
from tidegate.errors import EngineError
from tidegate.types import LISTED

NO_LOGPROB = -9999.0
"""vLLM's value for a missing logprob."""
SEEDS = 2**63
"""Upper bound of vLLM's seeds, which are signed."""
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def request_body(generation: Generation, name: str, adapter: str | None = None) -> dict[str, Any]:
    """Return the body of a request, to the base model or to a LoRA adapter of this name at vLLM."""
    return {
        **({} if adapter is None else {"model": adapter}),
        "request_id": name,
        "token_ids": generation.prompt_ids,
        "stream": generation.stream,
        "stream_options": {"include_usage": True} if generation.stream else None,
        "sampling_params": _params(generation),
    }


def _params(generation: Generation) -> dict[str, Any]:
    """Returns vLLM's sampling parameters. End-of-sequence ids become stop ids, so that vLLM reports which one
    it sampled."""
    params = generation.params
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "max_tokens": max(1, generation.limit),  # vLLM samples a token in any case
        "stop_token_ids": sorted(params.stop_ids),
        "ignore_eos": True,
        "seed": params.seed % SEEDS,
        # 0: of the sampled tokens alone. vLLM counts the sampled id among them, also where it is unlikely.
        "logprobs": generation.top_logprobs + 1 if generation.top_logprobs else 0,
        "detokenize": bool(params.stop),
    }
    if params.stop:
        body["stop"] = list(params.stop)
    if generation.logprob_start is not None:
        body["prompt_logprobs"] = generation.top_logprobs  # 0: of the prompt's own tokens alone
    if params.grammar is not None:
        grammar = {GRAMMARS[params.grammar.kind]: params.grammar.text}
        # As in the other engines: a model could otherwise emit whitespace without end.
        spaces = {"disable_any_whitespace": True} if params.grammar.kind == "json_schema" else {}
        body["structured_outputs"] = {**grammar, **spaces}
    return body


def refuse_unsupported(generation: Generation) -> None:
    """Raises RequestError that names a parameter with different semantics in vLLM."""
    params = generation.params
    if generation.stream and generation.logprob_start is not None:
        raise RequestError("logprob_start_len: vLLM streams no logprobs of the prompt; leave stream out")
    if generation.experts_start is not None:
        raise RequestError(
            "return_routed_experts = true: tidegate vllm returns no experts of tokens, whose form differs "
            "among vLLM's versions; use the embedded engine or SGLang for trainer.routing_replay"
        )
    if params.n != 1:
        raise RequestError(f"{PARAMS}n = {params.n}: send one request per reply, so that each can be aborted")
    if params.repetition_penalty != 1:
        raise RequestError(
            f"{PARAMS}repetition_penalty = {params.repetition_penalty}: vLLM counts the prompt's tokens too; "
            "leave it out"
        )


def take(generation: Generation, choice: Mapping[str, Any]) -> None:
    """Add the tokens of a reply or of a streamed piece. Raises EngineError if they are invalid."""
    if generation.limit == 0:  # no reply is requested
        generation.finish_reason = {"type": "length", "length": 0}
        return
    ids = choice.get("token_ids") or []
    tokens = (choice.get("logprobs") or {}).get("content") or []
    if [token.get("token_id") for token in tokens] != ids or any(
        token["logprob"] <= NO_LOGPROB for token in tokens
    ):
        raise EngineError(f"vLLM returned no logprobs for some of {len(ids)} tokens")
    generation.output_ids += ids
    generation.logprobs += [float(token["logprob"]) for token in tokens]
    if generation.top_logprobs:
        listed = [
            [(one["logprob"], one["token_id"]) for one in token.get("top_logprobs") or ()] for token in tokens
        ]
        generation.output_top += [np.array(_likeliest(found, generation), LISTED) for found in listed]
    if generation.sampling_mask:
        kept = choice.get("sampling_mask") or []
        if len(kept) != len(ids):
            raise EngineError(
                f"vLLM returned the kept ids of {len(kept)} of {len(ids)} tokens (return_sampling_mask): "
                'start it with engine.arguments = ["--return-sampling-mask"]'
            )
        generation.kept += kept
        generation.kept_logprobs += generation.logprobs[-len(ids) :] if ids else []
    reason = choice.get("finish_reason")
    if reason is not None:
        generation.spans = [
            (span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or []
        ]
        generation.finish_reason = _finish(reason, choice.get("stop_reason"), len(generation.output_ids))


def _finish(reason: str, stop: int | str | None, length: int) -> dict[str, Any]:
    if reason == "stop":
        return {"type": "stop", "matched": stop}
    if reason == "length":
        return {"type": "length", "length": length}
    if reason == "abort":
        return {"type": "abort", "message": "aborted"}
    raise EngineError(f"vLLM returned an unknown finish_reason: {reason!r}", retryable=True)


def take_prompt(generation: Generation, positions: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Set the prompt's logprobs, if they were requested. Raises EngineError if some are missing."""
    start = generation.logprob_start
    if start is None:
        return
    ids = generation.prompt_ids
    if not isinstance(positions, list) or len(positions) != len(ids):
        raise EngineError(f"vLLM returned no logprobs of a prompt of {len(ids)} tokens", retryable=True)
    found = [(positions[at] or {}).get(str(ids[at])) for at in range(start + 1, len(ids))]
    values = [entry["logprob"] for entry in found if entry is not None and entry["logprob"] > NO_LOGPROB]
    if len(values) != len(found):
        raise EngineError(f"vLLM returned logprobs of {len(values)} of {len(found)} tokens", retryable=True)
    generation.prompt_logprobs = [float(value) for value in values]
    if generation.top_logprobs:
        listed = [
            [(entry["logprob"], int(key)) for key, entry in (positions[at] or {}).items()]
            for at in range(start + 1, len(ids))
        ]
        generation.prompt_top = [_likeliest(found, generation) for found in listed]


def _likeliest(found: list[TokenLogprob], generation: Generation) -> list[TokenLogprob]:
    """Return the likeliest ids of one position, to which vLLM adds the prompt's own or the sampled one."""
    if len(found) < generation.top_logprobs:
        raise EngineError(
            f"vLLM returned logprobs of {len(found)} of {generation.top_logprobs} likeliest ids; vLLM's "
            "--max-logprobs bounds their number"
        )
    return sorted(found, reverse=True)[: generation.top_logprobs]


def take_usage(generation: Generation, usage: Mapping[str, Any] | None) -> None:
    generation.cached_tokens = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
