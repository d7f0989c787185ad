"""A fake engine with fault injection, and a gateway in this process that uses it.

The fake implements the engine protocol. Its replies are scripted (`say`) or a fixed function of the prompt;
each request takes the next fault in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from openai import AsyncOpenAI

from tests.local_rewards import LocalRewards
from tests.serving import served as served
from tests.waiting import eventually as eventually
from tidegate.gateway.client import GatewayClient, SessionAccess
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions


@dataclass(slots=True)
class Fault:
    """A fault of one request.

    `kind`: `status` (returns the status `value`), `refuse` (status 400 with the message `value`),
    `switch` (status 400, as the engine has the version `value` now), `hang`
    (until aborted or closed), `drop` (closes the connection), `break` (breaks a stream off after `value`
    tokens), `abort` (ends with finish_reason abort after `value` tokens), `no_logprobs`, `no_versions`,
    `no_top`, `version` (every span has the version `value`), `garbage` (not JSON), `hold` (waits for
    `FakeEngine.release`, then replies normally), `pause` (a stream waits after `value` tokens until it is
    aborted).
    """

    kind: str
    value: Any = None


@dataclass(slots=True)
class FakeEngine:
    """A fake engine; `start` and `stop` may alternate, on the same port."""

    decode: Callable[[Sequence[int]], str]
    vocabulary: int = 256
    stop_id: int | None = None
    version: Any = "0"
    max_context: int = 4096
    replies: deque[list[int]] = field(default_factory=deque)
    faults: deque[Fault] = field(default_factory=deque)
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    info_hangs: bool = False
    unanswered: int = 0
    """Probes that were given up."""
    stream_delay: asyncio.Event | None = None
    port: int = 0
    _runner: web.AppRunner | None = None
    _release: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def release(self) -> None:
        """Releases the held requests."""
        self._release.set()

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/model_info", self._info)
        for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
            app.router.add_post(path, self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, wanted: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits until a condition on the received requests is true."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(wanted)

    def output_for(self, prompt: Sequence[int], limit: int) -> list[int]:
        """The scripted reply, or ids that depend only on the prompt."""
        if self.replies:
            return self.replies.popleft()[:limit]
        digest = blake2b(orjson.dumps(list(prompt)), digest_size=32).digest()
        ids = [32 + byte % (self.vocabulary - 32) for byte in digest[: 3 + digest[0] % 8]]
        return ([*ids, self.stop_id] if self.stop_id is not None else ids)[:limit]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        fault = self.faults.popleft() if self.faults else Fault("none")
        self.requests.append(body)
        await self._tell()
        if fault.kind == "status":
            return web.json_response({"error": {"message": "as asked"}}, status=fault.value)
        if fault.kind == "switch":
            self.version = fault.value
            return web.json_response({"error": {"message": "lora_path: not loaded"}}, status=400)
        if fault.kind == "refuse":
            return web.json_response({"error": {"message": fault.value}}, status=400)
        if fault.kind == "garbage":
            return web.Response(text="<html>")
        if fault.kind == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "hold":
            await self._release.wait()
        output = self.output_for(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        if body["stream"]:
            return await self._stream(request, body, output, fault)
        return web.json_response(self._reply(body, output, fault, last=True), dumps=_dumps)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], output: list[int], fault: Fault
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        end = fault.value if fault.kind == "abort" else len(output)
        if fault.kind == "abort" and end == 0:
            await response.write(b"data: " + orjson.dumps(self._reply(body, [], fault, last=True)) + b"\n\n")
        for size in range(1, end + 1):
            if fault.kind == "pause" and size > fault.value:
                await self.until(lambda: body["rid"] in self.aborted)
                ended = self._reply(body, output[: fault.value], Fault("abort", fault.value), last=True)
                await response.write(b"data: " + orjson.dumps(ended) + b"\n\n")
                break
            if fault.kind == "break" and size > fault.value:
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.stream_delay is not None and size > 1:
                await self.stream_delay.wait()
            payload = self._reply(body, output[:size], fault, last=size == end)
            await response.write(b"data: " + orjson.dumps(payload) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, body: dict[str, Any], output: list[int], fault: Fault, last: bool) -> dict[str, Any]:
        aborted = fault.kind == "abort"
        if aborted:
            output = output[: fault.value]
        full = len(output) >= body["sampling_params"]["max_new_tokens"]
        ended = bool(output) and output[-1] == self.stop_id
        kind = "abort" if aborted else "length" if full and not ended else "stop"
        version = fault.value if fault.kind == "version" else self.version
        meta: dict[str, Any] = {
            "id": body.get("rid", "made up"),
            "finish_reason": {"type": kind} if last else None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(output),
            "cached_tokens": 0,
            "output_token_logprobs": [[logprob_of(one, i), one, None] for i, one in enumerate(output)],
            "weight_version": str(version),
            "weight_versions": [{"version": version, "start": 0, "end": len(output)}] if output else [],
        }
        if last and fault.kind != "no_top" and (listed := body.get("top_logprobs_num")):
            meta["output_top_logprobs"] = [
                [[logprob_of(one, i) - at, one + at, None] for at in range(listed)]
                for i, one in enumerate(output)
            ]
        if last and fault.kind != "no_kept" and body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[one, one + 1] for one in output]
            meta["output_token_sampling_logprobs"] = [logprob_of(one, i) / 2 for i, one in enumerate(output)]
        if fault.kind == "no_logprobs":
            del meta["output_token_logprobs"]
        if fault.kind == "no_versions":
            del meta["weight_versions"]
        return {"output_ids": output, "text": self.decode(output), "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append(orjson.loads(await request.read())["rid"])
        await self._tell()
        return web.json_response({"success": True})

    async def _control(self, request: web.Request) -> web.Response:
        self.version = orjson.loads(await request.read()).get("weight_version", self.version)
        return web.json_response({"success": True})

    async def _info(self, _: web.Request) -> web.Response:
        if self.info_hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.unanswered += 1
        return web.json_response(
            {"model_path": "fake", "weight_version": str(self.version), "max_context": self.max_context}
        )

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def logprob_of(token: int, position: int) -> float:
    """A logprob that encodes its token and position."""
    return -(token + 1) / 1024 - position / 8


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()


@dataclass(slots=True)
class Stage:
    """A running gateway, its client and its fake engine."""

    gateway: Gateway
    client: GatewayClient
    engine: FakeEngine
    url: str
    stack: contextlib.AsyncExitStack

    async def llm(self, access: SessionAccess, **options: Any) -> AsyncOpenAI:
        """The real SDK with a session's URL and key; closed with the stage."""
        made = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, **options)
        return await self.stack.enter_async_context(made)

    def say(self, text: str, *, ended: bool = True) -> list[int]:
        """Scripts the next reply; returns its ids."""
        ids = self.gateway.renderer.encode(text)
        if ended:
            ids.append(self.gateway.renderer.stop_ids[0])
        self.engine.replies.append(ids)
        return ids


@contextlib.asynccontextmanager
async def staged(
    model: Path, *, engine_type: type[FakeEngine] = FakeEngine, **options: Any
) -> AsyncIterator[Stage]:
    """Runs a gateway with one fake engine; `options` are GatewayOptions.

    `rewarders` and `reward_timeout_s` are those of LocalRewards.
    """
    rewarders, timeout_s = options.pop("rewarders", {}), options.pop("reward_timeout_s", 30.0)
    options.setdefault("environments", LocalRewards(rewarders, timeout_s))
    gateway = Gateway(GatewayOptions(model=model, **{"admin_key": "admin", **options}))
    renderer = gateway.renderer
    engine = engine_type(renderer.decode, stop_id=renderer.stop_ids[0])
    await engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        stack.callback(engine.release)
        url = await stack.enter_async_context(served(create_app(gateway)))
        client = await stack.enter_async_context(GatewayClient(url, gateway.options.admin_key))
        await client.add_engine(engine.url)
        yield Stage(gateway, client, engine, url, stack)
