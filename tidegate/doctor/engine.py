"""Checks that an engine returns ids, logprobs and versions, and that they are plausible."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import orjson

from tidegate.config import Settings
from tidegate.doctor.findings import Finding, error, ok, warning
from tidegate.errors import EngineError
from tidegate.gateway.engines.protocol import read_version
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.service.api_key import engine_key
from tidegate.service.http_client import engine_headers
from tidegate.trainer.publish.engine_control import EngineControl

TOKENS = 16
INFO_S = 10.0
GENERATE_S = 60.0
IMPROBABLE = -60.0
"""Lowest plausible logprob of a sampled token."""


async def check_engine(
    url: str, prompt: Sequence[int], temperature: float, renderer: Renderer
) -> list[Finding]:
    """Requests one reply of an engine for the token ids `prompt`, and returns the findings."""
    try:
        async with aiohttp.ClientSession() as http:
            info = await _json(http, "GET", url + "/model_info", None, INFO_S)
            body = _request(prompt, temperature)
            reply = await _json(http, "POST", url + "/generate", body, GENERATE_S)
    except TimeoutError:
        text = f"the engine at {url} does not answer in time"
        return [error("engine", "engine_hangs", text, "check whether it is paused or still loading")]
    except (aiohttp.ClientConnectionError, aiohttp.InvalidURL) as failure:
        return [error("engine", "engine_unreachable", f"no engine answers at {url}: {failure}")]
    except ValueError as failure:
        return [error("engine", "engine_refuses", f"the engine at {url} {failure}")]
    return judge_reply(url, reply, info, renderer)


async def check_fields(url: str, settings: Settings) -> list[Finding]:
    """Samples a token as in training, and returns an error for each value that the settings need and its
    reply lacks: likeliest and kept ids, experts."""
    listed, routed = settings.trainer.loss.listed_ids, settings.trainer.routing_replay
    kept = settings.sampling.records_kept_ids
    if not (listed or kept or routed):
        return []
    try:
        async with aiohttp.ClientSession() as http:
            await EngineControl(url, http).check_sample(listed, kept_ids=kept, routed=routed)
    except EngineError as failure:
        return [error("engine", "engine_lacks_values", str(failure))]
    return []


async def _json(
    http: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """Raises ValueError if the response is an error, or not a JSON object."""
    headers = engine_headers(url, engine_key())
    async with asyncio.timeout(seconds), http.request(method, url, json=body, headers=headers) as response:
        answer = await response.read()
        if response.status != 200:
            raise ValueError(
                f"answered {response.status} to {method} {url}: {answer[:300].decode(errors='replace')}"
            )
        try:
            value = orjson.loads(answer)
        except orjson.JSONDecodeError:
            raise ValueError(f"answered {method} {url} with invalid JSON: {answer[:100]!r}") from None
        if not isinstance(value, dict):
            raise ValueError(f"answered {method} {url} without a JSON object")
        return value


def _request(prompt: Sequence[int], temperature: float) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "stream": False,
        "rid": uuid.uuid4().hex,
    }


def judge_reply(url: str, reply: dict[str, Any], info: dict[str, Any], renderer: Renderer) -> list[Finding]:
    """Findings on the reply of one `/generate` call."""
    meta = reply.get("meta_info")
    ids = reply.get("output_ids")
    if (
        not isinstance(meta, dict)
        or not isinstance(ids, list)
        or not all(type(token) is int for token in ids)
    ):
        text = f"the engine at {url} returned no output_ids; it must implement SGLang's /generate"
        return [error("engine", "engine_no_ids", text)]
    if not ids:
        return [error("engine", "engine_no_ids", f"the engine at {url} returned an empty reply")]
    findings = [
        *_logprobs(url, ids, meta.get("output_token_logprobs")),
        *_versions(url, len(ids), meta, info),
        *_text(url, ids, reply.get("text"), renderer),
    ]
    version = meta.get("weight_version")
    return findings or [ok("engine", f"{url} returns ids, logprobs and versions (version {version})")]


def _logprobs(url: str, ids: list[int], pairs: Any) -> Iterator[Finding]:
    if not isinstance(pairs, list) or not pairs:
        text = f"the engine at {url} returned no logprobs"
        yield error("engine", "engine_no_logprobs", text, "it must support return_logprob")
        return
    try:
        values = [float(pair[0]) for pair in pairs]
        logprob_ids = [pair[1] for pair in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        yield error(
            "engine", "engine_no_logprobs", f"the engine at {url} returned no logprobs for some tokens"
        )
        return
    if logprob_ids != ids:
        text = f"the engine at {url} returned logprobs of tokens that are not its output_ids"
        yield error("engine", "engine_other_logprobs", text)
    if not all(map(math.isfinite, values)) or max(values) > 1e-4 or min(values) < IMPROBABLE:
        strange = next(x for x in values if not math.isfinite(x) or x > 1e-4 or x < IMPROBABLE)
        text = f"the engine at {url} returned the implausible logprob {strange:g}"
        yield error("engine", "engine_bad_logprobs", text)
    elif len(ids) > 3 and len(set(values)) == 1:
        text = (
            f"the engine at {url} returned the logprob {values[0]:g} "
            f"for all {len(ids)} tokens: they are not computed, or sampling is greedy"
        )
        yield error("engine", "engine_bad_logprobs", text)


def _versions(url: str, length: int, meta: dict[str, Any], info: dict[str, Any]) -> Iterator[Finding]:
    fix = "a version is a decimal integer: start the engine with a numeric weight version"
    spans = meta.get("weight_versions")
    if not isinstance(spans, list) or not spans:
        text = f"the engine at {url} reports no weight version for its tokens (no weight_versions)"
        yield error("engine", "engine_no_versions", text, fix)
        return
    at = 0
    for span in spans:
        version = read_version(span.get("version")) if isinstance(span, dict) else None
        if version is None:
            text = f"the engine at {url} reports the weight version {span!r}, which is not a number"
            yield error("engine", "engine_bad_versions", text, fix)
            return
        if span.get("start") != at or type(span.get("end")) is not int or span["end"] <= at:
            break
        at = span["end"]
    if at != length:
        text = f"the engine at {url} reports versions of {at} tokens, but returned {length}: {spans}"
        yield error("engine", "engine_bad_versions", text)
    elif read_version(info.get("weight_version")) != read_version(spans[-1]["version"]):
        text = (
            f"the engine at {url} reports version {info.get('weight_version')!r}, "
            f"but sampled with {spans[-1]['version']!r}"
        )
        yield warning("engine", "engine_two_versions", text)


def _text(url: str, ids: list[int], text: Any, renderer: Renderer) -> Iterator[Finding]:
    """Compares the engine's text with the gateway's decoding; they differ if it serves another model."""
    if not isinstance(text, str) or not text:
        return
    try:
        ours = renderer.decode(ids)
    except (IndexError, OverflowError):
        ours = ""
    if _plain(text) != _plain(ours):
        text = (
            f"the engine at {url} decodes its tokens as {text[:40]!r}, model.path's tokenizer as "
            f"{ours[:40]!r}: they may be different models"
        )
        yield warning("engine", "engine_other_tokenizer", text, "serve the model that model.path names")


def _plain(text: str) -> str:
    """Removes whitespace and incomplete characters."""
    return "".join(text.replace("\ufffd", "").split())
