"""A request in SGLang's words, in vLLM's; and vLLM's answer, back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.requests.request import Generation
from tidegate.engine.server.replies import reply
from tidegate.engine.validation import PARAMS, RequestError
from tidegate.errors import EngineError

NO_LOGPROB = -9999.0
"""What vLLM says in place of a logprob that it has not."""
SEEDS = 2**63
"""vLLM's seeds are signed."""
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def request_body(generation: Generation, name: str) -> dict[str, Any]:
    """The body of vLLM's `/inference/v1/generate`; `name` is the request's id there."""
    return {
        "request_id": name,
        "token_ids": generation.prompt_ids,
        "stream": generation.stream,
        "stream_options": {"include_usage": True} if generation.stream else None,
        "sampling_params": _params(generation.params, generation.limit),
    }


def _params(params: SamplingParams, limit: int) -> dict[str, Any]:
    """End-of-sequence ids are among the stop ids, so that vLLM says which of them it was."""
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "max_tokens": limit,
        "stop_token_ids": sorted(params.stop_ids),
        "ignore_eos": True,
        "seed": params.seed % SEEDS,
        "logprobs": 0,
        "detokenize": bool(params.stop),
    }
    if params.stop:
        body["stop"] = list(params.stop)
    if params.grammar is not None:
        grammar = {GRAMMARS[params.grammar.kind]: params.grammar.text}
        # As the other engines do: whitespace that a schema allows anywhere could go on for ever.
        spaces = {"disable_any_whitespace": True} if params.grammar.kind == "json_schema" else {}
        body["structured_outputs"] = {**grammar, **spaces}
    return body


def refuse_unsupported(params: SamplingParams) -> None:
    """Raises RequestError that names what vLLM does in another way."""
    if params.n != 1:
        raise RequestError(f"{PARAMS}n = {params.n}: ask once for each reply, so that each can be aborted")
    if params.repetition_penalty != 1:
        raise RequestError(
            f"{PARAMS}repetition_penalty = {params.repetition_penalty}: vLLM counts the prompt's tokens too; "
            "leave it out"
        )


def take(generation: Generation, choice: Mapping[str, Any]) -> None:
    """Add what vLLM sampled: all of it, or one piece of a stream. Raises EngineError where it is nonsense."""
    ids = choice.get("token_ids") or []
    said = (choice.get("logprobs") or {}).get("content") or []
    if [one.get("token_id") for one in said] != ids or any(one["logprob"] <= NO_LOGPROB for one in said):
        raise EngineError(f"vLLM gave no logprobs for some of {len(ids)} tokens")
    generation.output_ids += ids
    generation.logprobs += [float(one["logprob"]) for one in said]
    reason = choice.get("finish_reason")
    if reason is not None:
        generation.spans = [
            (one["version"], one["start"], one["end"]) for one in choice.get("weight_versions") or []
        ]
        generation.finish_reason = _finish(reason, choice.get("stop_reason"), len(generation.output_ids))


def _finish(reason: str, stop: int | str | None, length: int) -> dict[str, Any]:
    if reason == "stop":
        return {"type": "stop", "matched": stop}
    if reason == "length":
        return {"type": "length", "length": length}
    if reason == "abort":
        return {"type": "abort", "message": "aborted"}
    raise EngineError(f"vLLM ended a request with {reason!r}", retryable=True)


def take_usage(generation: Generation, usage: Mapping[str, Any] | None) -> None:
    generation.cached_tokens = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def answer(generation: Generation, version: str) -> dict[str, Any]:
    """SGLang's reply, without the text: the gateway decodes ids itself."""
    body = reply(generation, len(generation.output_ids), "", version)
    del body["text"]
    return body
