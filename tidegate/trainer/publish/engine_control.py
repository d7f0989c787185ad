"""Control calls to one engine: pause, load weights, resume, query the version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tidegate.errors import EngineError, IncompatibleEngineError
from tidegate.service.api_key import engine_key
from tidegate.service.http_client import engine_headers
from tidegate.settings.servers import DEFAULT_KEPT
from tidegate.weights.adapter_files import (
    adapter_label,
    adapter_names,
    base_directory,
    read_headers,
    split_label,
)
from tidegate.weights.files import WeightsError, is_adapter, transfer_s

Errors = Sequence[EngineError | None]
CALL_S = 60.0
"""Timeout of a call, besides the time to transfer weights."""
REQUIRED_FIELDS = {
    "output_token_logprobs": "its logprob",
    "weight_versions": "the version of the weights behind it",
}
"""Fields of a reply's `meta_info` that training needs of every token."""
PROBE_TIMEOUT_S = 2.0
"""Timeout of a probe for an engine that may be down."""


class EngineControl:
    """Control calls of one engine, in SGLang's protocol. All methods raise EngineError.

    With `keep_kv_of` a pause leaves running requests their keys and values if the engine has this version.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, keep_kv_of: int | None = None) -> None:
        self.url = url.rstrip("/")
        self.keeps_kv = False
        """Whether requests of the last pause keep their keys and values."""
        self._http = http
        self._keep_kv_of = keep_kv_of

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        """POST `body`, or GET if it is None.

        The timeout is CALL_S plus the time for a transfer of `size` bytes of weights.
        """
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        return await self._request(method, path, data, "application/json", size)

    async def send_difference(self, data: bytes, version: int) -> None:
        """Have the engine apply an encoded difference to its live weights as `version`, without a pause."""
        path = f"/update_weights_from_difference?weight_version={version}"
        await self._request("POST", path, data, "application/octet-stream", len(data))
        await self.verify(version)

    async def _request(
        self, method: str, path: str, data: bytes | None, kind: str, size: int
    ) -> dict[str, Any]:
        headers = {"Content-Type": kind, **engine_headers(self.url, engine_key())}
        timeout = aiohttp.ClientTimeout(total=CALL_S + transfer_s(size))
        try:
            async with self._http.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(
                f"engine {self.url}{path}: {type(error).__name__}: {error}", retryable=True
            ) from None
        if reply.status != 200:
            # Below 500 it is a refusal, which a repetition would meet again.
            raise EngineError(
                f"engine {self.url}{path}: {reply.status}: {text[:300]}", retryable=reply.status >= 500
            )
        try:
            result = orjson.loads(text)
        except orjson.JSONDecodeError:
            result = {}
        return result if isinstance(result, dict) else {}

    async def version(self) -> int:
        """Return the version that the engine reports; raises EngineError if it is not a number."""
        label = (await self.call("/model_info")).get("weight_version")
        try:
            return int(split_label(str(label))[0])
        except ValueError:
            raise EngineError(
                f"engine {self.url} reports the version {label!r}, which is not a number"
            ) from None

    async def probe_label(self) -> str | None:
        """Return the engine's version label; None if it does not respond within PROBE_TIMEOUT_S."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return split_label(str((await self.call("/model_info")).get("weight_version")))[0]
        except (EngineError, TimeoutError):
            return None

    async def checksums(self, size: int) -> dict[str, str]:
        """Return the checksum of each tensor of the engine's ranks; `size`: bytes of all weights.

        Raises EngineError if the engine gives none.
        """
        reply = await self.call("/weights_checker", {"action": "checksum"}, size)
        found = {
            f"{name} of rank {rank}": str(value)
            for rank, part in enumerate(reply.get("ranks") or [])
            for name, value in part["checksums"].items()
        }
        if not found:
            raise EngineError(f"engine {self.url} gives no checksums of its weights (/weights_checker)")
        return found

    async def check_sample(
        self, listed_ids: int = 0, *, kept_ids: bool = False, routed: bool = False
    ) -> None:
        """Sample one token as for training, with this number of likeliest ids in its place, with the ids that
        top-p keeps if `kept_ids`, and with the experts of the prompt if `routed`.

        Raises IncompatibleEngineError if the reply lacks fields that training needs, as in unsupported
        versions.
        """
        body: dict[str, Any] = {
            # Every vocabulary has the id 0, so that the check needs no tokenizer.
            "input_ids": [0], "return_logprob": True, "stream": False,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            **({"top_logprobs_num": listed_ids} if listed_ids else {}),
            **({"return_routed_experts": True} if routed else {}),
        }  # fmt: skip
        if kept_ids:
            body |= {"return_sampling_mask": True}
            body["sampling_params"] |= {"top_p": 0.95, "top_k": DEFAULT_KEPT}
        meta = (await self.call("/generate", body)).get("meta_info")
        missing = [
            what for name, what in REQUIRED_FIELDS.items() if not (isinstance(meta, dict) and meta.get(name))
        ]
        if listed_ids and isinstance(meta, dict) and not any(meta.get("output_top_logprobs") or ()):
            missing.append(f"its likeliest ids (trainer.loss.score_centering = {listed_ids})")
        if kept_ids and isinstance(meta, dict) and not meta.get("output_token_sampling_mask"):
            missing.append(
                "the ids that top-p and top-k kept (sampling.top_p, top_k, min_p or narrowed_by_agents)"
            )
        if routed and isinstance(meta, dict) and not meta.get("routed_experts"):
            missing.append(
                "the experts of its prompt (trainer.routing_replay: SGLang needs "
                "--enable-return-routed-experts)"
            )
        if missing:
            raise IncompatibleEngineError(
                f"engine {self.url}: a sampled token lacks {' and '.join(missing)}, which training needs; "
                "use SGLang 0.5.23, `tidegate engine` or `tidegate vllm`"
            )

    async def load(self, weights: Path, version: int) -> None:
        """Load the weights of a directory as `version`; resumes the engine in any case, also if cancelled.

        An engine that reads weights while requests run (`staged`) is not paused: a trainer that is killed
        meanwhile would leave it paused.
        """
        size = await asyncio.to_thread(_total_bytes, weights)
        try:
            info = await self.call("/model_info")
            if is_adapter(weights) and not info.get("adapters"):
                await self._load_adapter(weights, version, size)
                return
            if not info.get("staged"):
                await self.pause()
            body = {
                # Cached keys and values of prefixes are those of the earlier weights: they are flushed.
                "model_path": str(weights), "weight_version": str(version),
                "flush_cache": not self.keeps_kv, "abort_all_requests": False,
            }  # fmt: skip
            await self.call("/update_weights_from_disk", body, size)
            await self.verify(version)
            await self.resume()
        except (EngineError, asyncio.CancelledError):  # it may be paused, although there was no reply yet
            await self.try_resume()
            raise

    async def _load_adapter(self, weights: Path, version: int, size: int) -> None:
        """Load adapters by SGLang's routes, beside the ones that requests name; none is paused."""
        try:
            headers = await asyncio.to_thread(read_headers, weights)
            names, loaded = adapter_names(version, headers), await self._adapters()
            for name, header in headers.items():
                if names[name] in loaded:  # maybe of another run
                    await self.call("/unload_lora_adapter", {"lora_name": names[name]})
                body = {"lora_name": names[name], "lora_path": str(header.directory)}
                await self.call("/load_lora_adapter", body, size)
        except WeightsError as error:
            raise EngineError(f"engine {self.url}: {error}") from error
        except EngineError as error:
            if error.retryable:
                raise
            raise EngineError(
                f"engine {self.url} loads no LoRA adapters: {error}. Start SGLang or vLLM with "
                '--enable-lora, use `tidegate engine`, or set trainer.lora.publish = "merged"'
            ) from error
        # Only now: requests name all adapters of the version that the label tells.
        label = adapter_label(version, headers)
        await self.call("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        await self.verify(version)

    async def unload_adapters(self, version: int, *, named: bool = False) -> None:
        """Unload the adapters of other versions, after the requests that name them.

        Without `named` those of several policies stay: another program may have given them such names.
        """
        for name in await self._adapters():
            label, mark, _ = name.partition("-")
            earlier = split_label(label)[1] is not None and label != f"v{version}"
            if earlier and (named or not mark):
                await self.call("/unload_lora_adapter", {"lora_name": name})

    async def _adapters(self) -> set[str]:
        """Return the names of the adapters that the engine has loaded, and of its base model."""
        return {str(model.get("id")) for model in (await self.call("/v1/models")).get("data") or ()}

    async def pause(self) -> None:
        if self._keep_kv_of is not None:  # only now: the label changes before the next pause
            label = (await self.call("/model_info")).get("weight_version")
            self.keeps_kv = label == str(self._keep_kv_of)
            self._keep_kv_of = None
        await self.call("/pause_generation", {"mode": "in_place" if self.keeps_kv else "retract"})

    async def resume(self) -> None:
        await self.call("/continue_generation", {})

    async def try_resume(self) -> None:
        """Resume the engine after an error, which counts more than that it cannot be resumed."""
        with contextlib.suppress(EngineError):
            await self.resume()

    async def verify(self, version: int) -> None:
        """Raises EngineError if the engine reports another version."""
        reported = await self.version()
        if reported != version:
            raise EngineError(f"engine {self.url} reports version {reported} after loading {version}")


def _total_bytes(weights: Path) -> int:
    """Return the size of the files in bytes; 0 if they are missing, which the engine will report.

    An adapter counts with its base model, which an engine with other weights reads as well.
    """
    try:
        places = {weights, base_directory(weights)}
        return sum(file.stat().st_size for place in places for file in place.iterdir())
    except (FileNotFoundError, WeightsError):
        return 0


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """What engines must report of tokens, so that they can be trained on."""

    listed_ids: int = 0
    """Number of likeliest ids in place of each token."""
    kept_ids: bool = False
    """Whether to report the ids that top-p, top-k and min-p keep."""
    routed: bool = False
    """Whether to report the experts of tokens."""

    async def of(self, engine: EngineControl) -> None:
        """Raises EngineError, and IncompatibleEngineError if the engine's tokens cannot be trained on."""
        await engine.check_sample(self.listed_ids, kept_ids=self.kept_ids, routed=self.routed)

    async def of_all(self, urls: Sequence[str]) -> None:
        """Raises IncompatibleEngineError; engines that do not respond are skipped."""
        async with aiohttp.ClientSession() as http:
            checks = [error_of(self.of(EngineControl(url, http))) for url in urls]
            refusal = refusal_in(await asyncio.gather(*checks))
        if refusal is not None:
            raise refusal


async def labels_of(urls: Sequence[str]) -> set[str | None]:
    """Return the versions that engines report, None for one that does not respond."""
    async with aiohttp.ClientSession() as http:
        return set(await asyncio.gather(*(EngineControl(url, http).probe_label() for url in urls)))


async def error_of(action: Awaitable[object]) -> EngineError | None:
    """Return the error that an action raises; None if it succeeds."""
    try:
        await action
    except EngineError as error:
        return error
    return None


def refusal_in(errors: Iterable[EngineError | None]) -> EngineError | None:
    """Return the first error after which another attempt would fail, too."""
    return next((error for error in errors if error is not None and not error.retryable), None)


async def switch_adapters(
    named: Mapping[str, bool], version: int, announce: Callable[[str], Awaitable[None]]
) -> None:
    """Have requests name the adapters of this version, and unload those of earlier ones.

    An engine that fails meanwhile has it after a restart, or unloads them at the next publish.

    Args:
        named: Whether policies have names, by URL of an engine.
        version: Version that the engines have loaded.
        announce: Has the gateway name the adapters that an engine serves now.
    """

    async def switch(url: str) -> None:
        await announce(url)
        with contextlib.suppress(EngineError):
            await EngineControl(url, http).unload_adapters(version, named=named[url])

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*map(switch, named))
