"""The data plane: what agents call. Raw ASGI, for it runs once a turn."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from tidegate.gateway.dialects import chat, messages
from tidegate.gateway.dialects.base import Dialect, ParsedRequest, ServedModel
from tidegate.gateway.errors import ApiError, unknown_model
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.response import ResponseWriter, refuse, respond
from tidegate.gateway.request import digest_of
from tidegate.gateway.sessions.calls import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.intake import Intake
from tidegate.gateway.turns.request_body import ClientGone
from tidegate.types import MODEL_NAME

log = logging.getLogger("tidegate.gateway")
TRAIN_HEADER = b"x-tidegate-train"
"""`no` exempts the request's turn from training, `yes` trains on it whatever its model's name is."""


class DialectEndpoint:
    """What makes turns in one dialect: `POST …/chat/completions` and its like."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self._gateway = gateway
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, session = self._gateway, None
        try:
            headers = dict(scope["headers"])
            session = authenticate(gateway, scope, headers)
            request, calls = await self._take(session, headers, receive)
        except ClientGone:
            return
        except ApiError as refusal:
            if session is not None:
                session.note_refusal(refusal)
            await refuse(send, self._dialect, refusal, gateway.metrics)
            return
        except Exception as error:  # noqa: BLE001 - logged, told to the client, and held against no agent
            await refuse(send, self._dialect, internal_error(session, error), gateway.metrics)
            return
        model = ServedModel(MODEL_NAME, gateway.renderer.token_text, gateway.turns.prompts.thought_end)
        exchange = ResponseWriter(
            session, self._dialect, request, calls, gateway.turns, gateway.metrics, model
        )
        await exchange.run(receive, send)

    async def _take(
        self, session: GatewaySession, headers: dict[bytes, bytes], receive: Receive
    ) -> tuple[ParsedRequest, list[PendingTurn]]:
        """The request, and the calls that it is answered with. Each of them can be asked for again by its
        place in the request; where one is refused all are."""
        gateway = self._gateway
        key = headers.get(b"idempotency-key")
        retries = headers.get(b"x-stainless-retry-count", b"0")
        retry = retries.isdigit() and bool(retries.strip(b"0"))
        kind = self._dialect.__name__.encode()
        calls: list[PendingTurn] = []
        async with Intake(session, gateway.turns, gateway.threads) as intake:
            body = await intake.body(receive)
            parsed = await intake.parse(body)
            await gateway.turns.settled(session, parsed.text)
            request = await intake.read(
                parsed, lambda payload: self._dialect.read(payload, session), lambda made: made.asks
            )
            await gateway.turns.settled(session, asks=request.asks)
            exempt = exemption(session, parsed.value, headers)
            try:
                for index, ask in enumerate(request.asks):
                    place = b"%s/%d/" % (kind, index)
                    ask = replace(
                        ask,
                        digest=await intake.digest(digest_of, place, body),
                        idempotency_key=None if key is None else (place + key).decode("latin-1"),
                        exempt=exempt,
                        retry=retry,
                    )
                    calls.append(await intake.call(ask))
            except BaseException:
                for call in calls:
                    gateway.turns.abandon(session, call)
                raise
        return request, calls


class CountEndpoint:
    """`POST …/messages/count_tokens`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, session = self._gateway, None
        try:
            session = authenticate(gateway, scope, dict(scope["headers"]))
            async with Intake(session, gateway.turns, gateway.threads) as intake:
                body = await intake.body(receive)
                parsed = await intake.parse(body)
                ask = await intake.read(parsed, messages.read_prompt, lambda made: [made], counts=False)
                tokens = await intake.count(ask)
        except ClientGone:
            return
        except ApiError as refusal:
            await refuse(send, messages, refusal, gateway.metrics)
            return
        except Exception as error:  # noqa: BLE001 - as above
            await refuse(send, messages, internal_error(session, error), gateway.metrics)
            return
        await respond(send, 200, orjson.dumps({"input_tokens": tokens}))


class ModelsEndpoint:
    """`GET …/models` and `…/models/{name}`, in Anthropic's shape where Anthropic's version is named."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        dialect = messages if b"anthropic-version" in headers else chat
        name = scope["path_params"].get("name")
        try:
            authenticate(self._gateway, scope, headers)
            if name not in (None, MODEL_NAME):
                raise unknown_model(name, MODEL_NAME)
        except ApiError as refusal:
            await refuse(send, dialect, refusal, self._gateway.metrics)
            return
        await respond(send, 200, dialect.models(MODEL_NAME) if name is None else dialect.model(MODEL_NAME))


def exemption(session: GatewaySession, payload: dict[str, Any], headers: dict[bytes, bytes]) -> str | None:
    """Why a request's turn is not trained on, None where it is; the header goes over the model's name."""
    told = headers.get(TRAIN_HEADER)
    if told is not None:
        if told.lower() not in (b"yes", b"no"):
            name = TRAIN_HEADER.decode()
            raise ApiError(f"{name}: {told.decode('latin-1')!r} is neither yes nor no"[:300], param=name)
        return f"header {TRAIN_HEADER.decode()}: no" if told.lower() == b"no" else None
    model = payload.get("model")
    return f"model name {model!r}" if model in session.untrained_models else None


def authenticate(gateway: Gateway, scope: Scope, headers: dict[bytes, bytes]) -> GatewaySession:
    """The session that the call's key opens; a path that names another one is refused alike."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    token = key.strip().decode("latin-1")
    return gateway.sessions.authenticate(token, scope.get("path_params", {}).get("session_id"))


def internal_error(session: GatewaySession | None, error: Exception) -> ApiError:
    """A request on which the gateway itself failed: that is not the agent's fault."""
    log.error("a request could not be read", exc_info=error)
    if session is not None:
        session.gave_up = f"the gateway failed on a request: {error!r}"
    return ApiError(f"the gateway cannot make sense of this: {type(error).__name__}")
