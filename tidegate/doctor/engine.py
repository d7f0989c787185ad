"""Does an engine really give back ids, logprobs and versions, and are they plausible?"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import orjson

from tidegate.doctor.findings import Finding, error, ok, warning
from tidegate.gateway.engines.protocol import read_version
from tidegate.gateway.rendering.renderer import Renderer

TOKENS = 16
INFO_S = 10.0
GENERATE_S = 60.0
IMPROBABLE = -60.0
"""Less likely than e^-60: no token is sampled so."""


async def check_engine(
    url: str, prompt: Sequence[int], temperature: float, renderer: Renderer
) -> list[Finding]:
    """One reply of an engine, read without mercy. `prompt` is token ids."""
    try:
        async with aiohttp.ClientSession() as http:
            info = await _json(http, "GET", url + "/model_info", None, INFO_S)
            body = _request(prompt, temperature)
            reply = await _json(http, "POST", url + "/generate", body, GENERATE_S)
    except TimeoutError:
        return [
            error(
                "engine",
                "engine_hangs",
                f"the engine at {url} does not answer in time",
                "is it paused, or loading?",
            )
        ]
    except (aiohttp.ClientConnectionError, aiohttp.InvalidURL) as failure:
        return [error("engine", "engine_unreachable", f"no engine answers at {url}: {failure}")]
    except ValueError as failure:
        return [error("engine", "engine_refuses", f"the engine at {url} {failure}")]
    return judge_reply(url, reply, info, renderer)


async def _json(
    http: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """Raises ValueError where the answer is an error, or no JSON object."""
    async with asyncio.timeout(seconds), http.request(method, url, json=body) as response:
        answer = await response.read()
        if response.status != 200:
            raise ValueError(
                f"answered {response.status} to {method} {url}: {answer[:300].decode(errors='replace')}"
            )
        try:
            found = orjson.loads(answer)
        except orjson.JSONDecodeError:
            raise ValueError(f"answered {method} {url} with what is not JSON: {answer[:100]!r}") from None
        if not isinstance(found, dict):
            raise ValueError(f"answered {method} {url} with no JSON object")
        return found


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
    if not isinstance(meta, dict) or not isinstance(ids, list) or not all(type(one) is int for one in ids):
        return [
            error(
                "engine",
                "engine_no_ids",
                f"the engine at {url} returned no output_ids; it must speak SGLang's /generate",
            )
        ]
    if not ids:
        return [error("engine", "engine_no_ids", f"the engine at {url} returned an empty reply")]
    found = [
        *_logprobs(url, ids, meta.get("output_token_logprobs")),
        *_versions(url, len(ids), meta, info),
        *_text(url, ids, reply.get("text"), renderer),
    ]
    version = meta.get("weight_version")
    return found or [ok("engine", f"{url}: ids, logprobs and versions come back (version {version})")]


def _logprobs(url: str, ids: list[int], pairs: Any) -> Iterator[Finding]:
    if not isinstance(pairs, list) or not pairs:
        yield error(
            "engine",
            "engine_no_logprobs",
            f"the engine at {url} returned no logprobs",
            "it must honour return_logprob",
        )
        return
    try:
        values = [float(pair[0]) for pair in pairs]
        told = [pair[1] for pair in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        yield error(
            "engine", "engine_no_logprobs", f"the engine at {url} returned no logprobs for some tokens"
        )
        return
    if told != ids:
        yield error(
            "engine",
            "engine_other_logprobs",
            f"the engine at {url} returned logprobs of other tokens than its output_ids",
        )
    if not all(map(math.isfinite, values)) or max(values) > 1e-4 or min(values) < IMPROBABLE:
        strange = next(one for one in values if not math.isfinite(one) or one > 1e-4 or one < IMPROBABLE)
        yield error(
            "engine",
            "engine_bad_logprobs",
            f"the engine at {url} returned the logprob {strange:g}, which no sampled token has",
        )
    elif len(ids) > 3 and len(set(values)) == 1:
        yield error(
            "engine",
            "engine_bad_logprobs",
            f"the engine at {url} returned the logprob {values[0]:g} "
            f"for all of {len(ids)} tokens: it makes them up, or samples greedily",
        )


def _versions(url: str, length: int, meta: dict[str, Any], info: dict[str, Any]) -> Iterator[Finding]:
    fix = "a version is a decimal integer: start the engine with a numeric weight version"
    spans = meta.get("weight_versions")
    if not isinstance(spans, list) or not spans:
        yield error(
            "engine",
            "engine_no_versions",
            f"the engine at {url} attests no weight version for its tokens (no weight_versions)",
            fix,
        )
        return
    at = 0
    for span in spans:
        version = read_version(span.get("version")) if isinstance(span, dict) else None
        if version is None:
            yield error(
                "engine",
                "engine_bad_versions",
                f"the engine at {url} attests the weight version {span!r}, which is not a number",
                fix,
            )
            return
        if span.get("start") != at or type(span.get("end")) is not int or span["end"] <= at:
            break
        at = span["end"]
    if at != length:
        yield error(
            "engine",
            "engine_bad_versions",
            f"the engine at {url} attests versions of {at} tokens, and gave {length}: {spans}",
        )
    elif read_version(info.get("weight_version")) != read_version(spans[-1]["version"]):
        yield warning(
            "engine",
            "engine_two_versions",
            f"the engine at {url} says that it serves version "
            f"{info.get('weight_version')!r}, and sampled with {spans[-1]['version']!r}",
        )


def _text(url: str, ids: list[int], text: Any, renderer: Renderer) -> Iterator[Finding]:
    """An engine that reads its own ids otherwise than the gateway does serves another model."""
    if not isinstance(text, str) or not text:
        return
    try:
        ours = renderer.decode(ids)
    except (IndexError, OverflowError):
        ours = ""
    if _plain(text) != _plain(ours):
        yield warning(
            "engine",
            "engine_other_tokenizer",
            f"the engine at {url} reads its tokens as "
            f"{text[:40]!r}, model.path's tokenizer as {ours[:40]!r}: they may be different "
            "models",
            "serve the model that model.path names",
        )


def _plain(text: str) -> str:
    """Without blanks, and without characters that a cut left half."""
    return "".join(text.replace("\ufffd", "").split())
