"""Samples at a Tinker service as an engine: each version is a snapshot, which a request keeps to its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import HEALTH_REQUEST, Generation, WeightUpdate, parse_generate
from tidegate.engine.server.adapter import ROUTES, answer
from tidegate.engine.server.http import protocol_app
from tidegate.engine.validation import PARAMS, RequestError
from tidegate.errors import EngineError
from tidegate.service.serve import Listen, bind, run_app
from tidegate.service.threads import within
from tidegate.settings.tinker import TinkerService
from tidegate.tinker.service import connect, read_snapshot, sdk, status_of, unique_name
from tidegate.vllm.model import ModelFiles
from tidegate.weights.files import WeightsError

SEEDS = 2**31
"""Upper bound of the seeds that every service takes."""
LOST = (400, 404, 410)
"""Statuses of samples of a snapshot that the service has no more."""
OPEN_S = 120.0
"""Timeout of the calls that open a session or a snapshot; those that sample end with their request."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    version: str
    client: Any
    """The SDK's SamplingClient."""
    state: str | None = None
    """Path of the state with the same weights."""


class TinkerEngine:
    """Engine of the service's snapshots; call `start` first.

    A service samples whole replies: a stream has one event.
    """

    pause_modes: tuple[str, ...] = ("abort", "retract")

    def __init__(self, settings: TinkerService, model: Path, version: int, key: str) -> None:
        self.settings = settings
        self.model = model
        self._key = key
        self._first = str(version)
        self._service: Any = None
        self._current: _Snapshot | None = None
        self._running: dict[asyncio.Task[Any], str] = {}
        self._taking = asyncio.Lock()
        self._taken_at = -math.inf
        """When a lost snapshot was taken again."""
        self._open = asyncio.Event()
        self._open.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def _live(self) -> _Snapshot:
        assert self._current is not None
        return self._current

    async def start(self) -> None:
        """Connect, and take the snapshot of the model's directory. Raises StartError, EngineError."""
        files = ModelFiles(self.model)
        self._text = await asyncio.to_thread(TokenDecoder.load, self.model)
        self.limits = TokenLimits(
            files.vocab_size,
            files.max_context,
            files.eos_ids | self._text.eos_ids,
            self._text.tokenizer is not None,
        )
        try:
            self._service = await asyncio.to_thread(within, OPEN_S, lambda: connect(self.settings, self._key))
        except TimeoutError as error:
            raise _failed("cannot open a session", error) from error
        self._current = await self._snapshot(self.model, self._first)

    async def _snapshot(self, directory: Path, version: str) -> _Snapshot:
        try:
            path, state = await asyncio.to_thread(read_snapshot, directory)
        except (OSError, ValueError, KeyError) as error:
            raise WeightsError(f"{directory}: not a version of a Tinker service: {error}") from None
        what = {"base_model": self.settings.base_model} if path is None else {"model_path": path}
        try:
            async with asyncio.timeout(OPEN_S):
                client = await self._service.create_sampling_client_async(**what)
        except Exception as error:
            raise _failed(f"cannot open {path or self.settings.base_model}", error) from error
        return _Snapshot(version, client, state)

    async def _take_again(self, lost: _Snapshot) -> _Snapshot:
        """Take a snapshot of the state with the same weights, in a session of its own.

        A service that restarts may sample only snapshots that it took since, as skyrl-tx 0.3.
        """

        def take(state: str) -> tuple[Any, str]:
            service = connect(self.settings, self._key)
            session = service.create_training_client_from_state_with_optimizer(state)
            name = unique_name("sampler")
            return service, session.save_weights_for_sampler(name).result(OPEN_S).path

        async with self._taking:
            if lost.state is not None and self._live.client is lost.client:
                service, path = await asyncio.to_thread(within, OPEN_S, partial(take, lost.state))
                async with asyncio.timeout(OPEN_S):
                    client = await service.create_sampling_client_async(model_path=path)
                self._taken_at = time.monotonic()
                if self._live.client is lost.client:
                    self._current = _Snapshot(self._live.version, client, lost.state)
            return self._live

    # -- sampling

    def read(self, body: Mapping[str, Any]) -> Generation:
        """Parse a request. Raises RequestError that names the invalid or unsupported parameter."""
        generation = parse_generate(body, self.limits)
        params = generation.params
        unsupported: dict[str, object] = {
            f"{PARAMS}n": params.n != 1,
            f"{PARAMS}min_p": params.min_p,
            f"{PARAMS}json_schema": params.grammar is not None,
            f"{PARAMS}frequency_penalty": params.frequency_penalty,
            f"{PARAMS}presence_penalty": params.presence_penalty,
            f"{PARAMS}repetition_penalty": params.repetition_penalty != 1,
            "logprob_start_len": generation.logprob_start is not None,
            "top_logprobs_num": generation.top_logprobs,
            "return_routed_experts": generation.experts_start is not None,
            "return_sampling_mask": generation.sampling_mask,
            "lora_path": generation.adapter,
        }
        for name, given in unsupported.items():
            if given:
                raise RequestError(f"{name}: tidegate tinker does not support it; leave it out")
        return generation

    async def sample(self, generation: Generation) -> dict[str, Any]:
        """Return the complete reply. Cancelling aborts the request."""
        task = asyncio.ensure_future(self._call(generation))
        with self._listed(task, generation.rid):
            try:
                sequence, version = await task
            except asyncio.CancelledError:
                if (own := asyncio.current_task()) is not None and own.cancelling():
                    raise
                generation.finish_reason = {"type": "abort", "message": "aborted"}
                return answer(generation, self._live.version)
            except Exception as error:
                raise _failed("cannot sample", error) from error
        self._take(generation, list(sequence.tokens), sequence.logprobs)
        generation.close_span(version)
        return answer(generation, version)

    async def _call(self, generation: Generation) -> tuple[Any, str]:
        """Wait while the engine is paused, and sample; returns the sequence and its snapshot's version."""
        await self._open.wait()
        snapshot, tinker, params = self._live, sdk(), generation.params
        request = {
            "prompt": tinker.ModelInput.from_ints(generation.prompt_ids),
            "num_samples": 1,
            "sampling_params": tinker.SamplingParams(
                max_tokens=max(1, generation.limit),
                seed=params.seed % SEEDS,
                stop=sorted(params.stop_ids),
                temperature=params.temperature,
                top_k=params.top_k if params.top_k > 0 else -1,
                top_p=params.top_p,
            ),
        }
        try:
            reply = await snapshot.client.sample_async(**request)
        except Exception as error:
            # A request may be refused for a reason of its own, which a new snapshot does not change.
            recent = self._live.client is snapshot.client and time.monotonic() - self._taken_at < OPEN_S
            if status_of(error) not in LOST or snapshot.state is None or recent:
                raise
            snapshot = await self._take_again(snapshot)
            reply = await snapshot.client.sample_async(**request)
        return reply.sequences[0], snapshot.version

    def _take(self, generation: Generation, ids: list[int], logprobs: list[float] | None) -> None:
        """Add the reply's tokens up to its first stop token or string. Raises EngineError."""
        if not ids or logprobs is None or len(logprobs) != len(ids):
            count = 0 if logprobs is None else len(logprobs)
            raise EngineError(f"the Tinker service returned {len(ids)} tokens with {count} logprobs")
        params = generation.params
        generation.finish_reason = {"type": "length", "length": len(ids)}
        for token, logprob in zip(ids, logprobs, strict=True):
            generation.output_ids.append(token)
            generation.logprobs.append(float(logprob))
            matched: int | str | None = token if token in params.stop_ids else None
            if matched is None and params.stop:
                matched = self._text.matched_stop(generation)
            if matched is not None:
                generation.finish_reason = {"type": "stop", "matched": matched}
                return
        if len(ids) < generation.limit:
            raise EngineError(
                f"the Tinker service ended a reply after {len(ids)} of {generation.limit} tokens, without a "
                "token of its stop list"
            )

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        yield await self.sample(generation)

    @contextlib.contextmanager
    def _listed(self, task: asyncio.Task[Any], rid: str) -> Iterator[None]:
        self._running[task] = rid
        try:
            yield
        finally:
            task.cancel()
            del self._running[task]

    # -- control calls (`ControlledEngine`)

    async def abort(self, prefix: str) -> int:
        """Give up requests; the service may sample them to their ends."""
        tasks = [task for task, rid in self._running.items() if rid.startswith(prefix)]
        for task in tasks:
            task.cancel()
        return len(tasks)

    async def pause(self, mode: str) -> None:
        """Hold back new requests; running ones keep their snapshot and go on."""
        self._open.clear()
        if mode == "abort":
            await self.abort("")

    async def resume(self) -> None:
        self._open.set()

    async def load_weights(self, update: WeightUpdate) -> dict[str, Any]:
        """Take the snapshot that a directory names. Raises WeightsError, EngineError."""
        version = update.version or self._live.version
        self._current = await self._snapshot(update.directory, version)
        if update.abort_all:
            await self.abort("")
        return {"weight_version": version}

    async def relabel(self, version: str) -> None:
        self._current = _Snapshot(version, self._live.client, self._live.state)

    async def flush(self) -> bool:
        return True

    async def info(self) -> dict[str, Any]:
        """Describe the engine; `staged`: an update needs no pause."""
        return {
            "model_path": str(self.model),
            "tokenizer_path": str(self.model) if self.limits.has_tokenizer else None,
            "tokenizer_hash": self._text.tokenizer_hash,
            "vocab_size": self.limits.vocab_size,
            "weight_version": self._live.version,
            "max_context": self.limits.max_context,
            "num_running": len(self._running),
            "staged": True,
        }

    async def check_health(self) -> None:
        """Check this process alone: calls wait for a service that restarts."""

    async def sample_one_token(self) -> None:
        await self.sample(self.read(HEALTH_REQUEST))


def _failed(what: str, error: Exception) -> EngineError:
    status = getattr(error, "status_code", 503)
    why = str(error) or f"no reply within {OPEN_S:g} s"
    return EngineError(
        f"the Tinker service: {what}: {type(error).__name__}: {why}",
        retryable=status in (408, 409, 425, 429) or status >= 500,
    )


def create_app(engine: TinkerEngine) -> Starlette:
    """The ASGI app, whose lifespan connects to the service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        yield

    return protocol_app(engine, "the Tinker engine", ROUTES, lifespan)


def serve(engine: TinkerEngine, listen: Listen, key: str | None) -> None:
    """Serve until a signal, to callers with the key if there is one."""
    sock = bind(listen)
    run_app(create_app(engine), sock, listen, keyless=key is None, key=key)
