"""Serves the data plane, which agents call. Raw ASGI, as its overhead counts in every turn."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from tidegate.errors import GatewayError
from tidegate.gateway.clients.conversations import Conversations
from tidegate.gateway.dialects import chat, messages
from tidegate.gateway.dialects.base import Dialect, ParsedRequest, ServedModel
from tidegate.gateway.errors import ApiError, unknown_model, wrong_project_key
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.response import ResponseWriter, refuse, respond
from tidegate.gateway.request import RawBody
from tidegate.gateway.sessions.model_calls import ModelCall
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.redaction import redact_body, redact_text
from tidegate.gateway.turns.request_reader import LARGE, ClientGone, RequestReader, read_body

log = logging.getLogger("tidegate.gateway")
TRAIN_HEADER = b"x-tidegate-train"
"""Header: `no` exempts the request's turn from training, `yes` trains on it whatever its model name."""


class DialectEndpoint:
    """Endpoint of one dialect, such as `POST …/chat/completions`."""

    def __init__(self, gateway: Gateway, dialect: Dialect, conversations: Conversations) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._conversations = conversations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, session = self._gateway, None
        try:
            headers = dict(scope["headers"])
            client = client_name(gateway, scope, headers)
            if client is None:
                session = authenticate(gateway, scope, headers)
            self._check_rate(client if session is None else session.client)
            flow = f"key {client}" if session is None else session.affinity.flow
            with gateway.bodies.counted(flow, receive) as counted:
                if session is None or gateway.options.redact is not None:
                    body = await redacted(gateway, await read_body(counted))
                    session = session or await self._conversations.session_of(
                        client or "", self._dialect, body, headers
                    )
                    counted = replay(body, counted)
                    del body  # what is large is not held while the reply is sampled
                await gateway.states.ready(session)
                request, calls = await self._read_request(session, headers, counted)
        except ClientGone:
            return
        except (ApiError, GatewayError) as error:
            refusal = error if isinstance(error, ApiError) else refused(error)
            if session is not None:
                session.note_refusal(_unread(gateway, refusal))
            await refuse(send, self._dialect, refusal, gateway.metrics)
            return
        except Exception as error:  # noqa: BLE001 - logged and returned to the client as an internal error
            await refuse(send, self._dialect, internal_error(session, error), gateway.metrics)
            return
        policy = gateway.policies.by_name[calls[0].policy]
        model = ServedModel(policy.model, policy.renderer.token_text, policy.prompts.thought_end)
        writer = ResponseWriter(session, self._dialect, request, calls, gateway.turns, gateway.metrics, model)
        await writer.run(receive, send)

    def _check_rate(self, client: str | None) -> None:
        """Counts a call of a client's key. Raises ApiError (429) above the key's limit."""
        if client is not None and (key := self._gateway.keys.named(client)) is not None:
            self._conversations.rates.check(key)

    async def _read_request(
        self, session: GatewaySession, headers: dict[bytes, bytes], receive: Receive
    ) -> tuple[ParsedRequest, list[ModelCall]]:
        """Reads a request and starts its calls; if one is refused, all are.

        A retry of a call is recognised by its position in the request.
        """
        gateway = self._gateway
        key = headers.get(b"idempotency-key")
        retries = headers.get(b"x-stainless-retry-count", b"0")
        retry = retries.isdigit() and bool(retries.strip(b"0"))
        dialect_name = self._dialect.__name__.encode()
        calls: list[ModelCall] = []
        async with RequestReader(session, gateway.turns, gateway.threads) as reader:
            body = await reader.body(receive)
            value = await reader.parse(body, _position(dialect_name, 0))
            policy = reader.choose(gateway.policies.of(value.get("model")).prompts)
            await gateway.turns.wait_for_closed_streams(session, body)
            request = await reader.read(
                value,
                lambda payload: self._dialect.read(payload, session),
                lambda request: request.turn_requests,
            )
            await gateway.turns.wait_for_closed_streams(session, turn_requests=request.turn_requests)
            exempt = (
                exemption_reason(session, value, headers) or untrained_key(gateway, session) or policy.exempt
            )
            try:
                for index, turn_request in enumerate(request.turn_requests):
                    position = _position(dialect_name, index)
                    turn_request = replace(
                        turn_request,
                        digest=await reader.digest(position, body, first=index == 0),
                        idempotency_key=None if key is None else (position + key).decode("latin-1"),
                        exempt=exempt,
                        policy=policy.name,
                        retry=retry,
                    )
                    calls.append(await reader.call(turn_request))
            except BaseException:
                # Calls that were started before the refused one would go on without a listener.
                for call in calls:
                    gateway.turns.on_disconnect(session, call)
                raise
        return request, calls


def _position(dialect: bytes, index: int) -> bytes:
    """Returns the prefix that distinguishes the digests of a body's several replies."""
    return b"%b/%d/" % (dialect, index)


class CountEndpoint:
    """`POST …/messages/count_tokens`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, session = self._gateway, None
        try:
            headers = dict(scope["headers"])
            client = client_name(gateway, scope, headers)
            if client is None:
                session = authenticate(gateway, scope, headers)
            else:  # a prompt of a conversation counts as if it began one
                session = GatewaySession(id="", key_hash=b"", opened=0.0, deadline=math.inf, client=client)
            with gateway.bodies.counted(session.affinity.flow, receive) as counted:
                if gateway.options.redact is not None:
                    counted = replay(await redacted(gateway, await read_body(counted)), counted)
                tokens = await self._tokens(session, counted)
        except ClientGone:
            return
        except ApiError as refusal:
            await refuse(send, messages, refusal, gateway.metrics)
            return
        except Exception as error:  # noqa: BLE001 - as above
            await refuse(send, messages, internal_error(session, error), gateway.metrics)
            return
        await respond(send, 200, orjson.dumps({"input_tokens": tokens}))

    async def _tokens(self, session: GatewaySession, receive: Receive) -> int:
        async with RequestReader(session, self._gateway.turns, self._gateway.threads) as reader:
            value = await reader.parse(await reader.body(receive))
            reader.choose(self._gateway.policies.of(value.get("model")).prompts)
            turn_request = await reader.read(
                value, messages.read_prompt, lambda request: [request], record_overflow=False
            )
            return await reader.count(turn_request)


class ModelsEndpoint:
    """`GET …/models` and `…/models/{name}`, in Anthropic's format for requests with `anthropic-version`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        dialect = messages if b"anthropic-version" in headers else chat
        name, models = scope["path_params"].get("name"), self._gateway.policies.models
        try:
            if client_name(self._gateway, scope, headers) is None:
                authenticate(self._gateway, scope, headers)
            if name is not None and name not in models:
                raise unknown_model(name, models)
        except ApiError as refusal:
            await refuse(send, dialect, refusal, self._gateway.metrics)
            return
        await respond(send, 200, dialect.models([name] if name else models, single=name is not None))


def exemption_reason(
    session: GatewaySession, payload: dict[str, Any], headers: dict[bytes, bytes]
) -> str | None:
    """Returns the reason that a turn is not trained on, or None; the header overrides the model name."""
    value = headers.get(TRAIN_HEADER)
    if value is not None:
        if value.lower() not in (b"yes", b"no"):
            name = TRAIN_HEADER.decode()
            raise ApiError(f"{name}: {value.decode('latin-1')!r} is neither yes nor no"[:300], param=name)
        return f"header {TRAIN_HEADER.decode()}: no" if value.lower() == b"no" else None
    model = payload.get("model")
    return f"model name {model!r}" if model in session.untrained_models else None


def untrained_key(gateway: Gateway, session: GatewaySession) -> str | None:
    """Returns the reason that a client's calls are not trained on, or None; no header overrides it.

    Calls of a key that was revoked since, or while the keys cannot be read, are not trained on either.
    """
    if session.client is None:
        return None
    key = gateway.keys.named(session.client)
    if key is None:
        return f"key {session.client!r}, which is not valid any more"
    return None if key.train else f"key {key.name!r}, which is not trained on"


def authenticate(gateway: Gateway, scope: Scope, headers: dict[bytes, bytes]) -> GatewaySession:
    """Returns the session of a call's key. Raises ApiError, also if the path names another session."""
    session_id = _session_id(scope)
    try:
        return gateway.sessions.authenticate(_key(headers), session_id)
    except ApiError:
        if session_id is None and gateway.keys.required:
            raise wrong_project_key() from None
        raise


def client_name(gateway: Gateway, scope: Scope, headers: dict[bytes, bytes]) -> str | None:
    """Returns the name of a call's project key; None for other keys, and for paths that name a session."""
    return None if _session_id(scope) is not None else gateway.keys.name_of(_key(headers))


def _session_id(scope: Scope) -> str | None:
    session_id: str | None = scope.get("path_params", {}).get("session_id")
    return session_id


def _key(headers: dict[bytes, bytes]) -> str:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    # Anthropic's clients send `x-api-key`.
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    return key.strip().decode("latin-1")


async def redacted(gateway: Gateway, body: RawBody) -> RawBody:
    """Returns a request body as `gateway.redact` leaves it. Raises ApiError."""
    redaction = gateway.options.redact
    if redaction is None:
        return body
    return await gateway.threads.run(len(body) > LARGE, redact_body, body, redaction)


def _unread(gateway: Gateway, refusal: ApiError) -> ApiError:
    """Returns a refusal as it may be recorded: its text may quote a request that is not redacted, such as
    the name of an unknown field."""
    redaction = gateway.options.redact
    if redaction is None or refusal.code == "redaction_failed":
        return refusal
    return ApiError(redact_text(str(refusal), redaction), status=refusal.status)


def replay(body: RawBody, receive: Receive) -> Receive:
    """Returns a receive function that replays a body that was read."""
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def refused(error: GatewayError) -> ApiError:
    """Returns the error of a call that the gateway cannot serve, such as while its journal's disk is full."""
    status = error.status or 400
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(str(error), status=status, type=kind, retryable=status >= 500)


def internal_error(session: GatewaySession | None, error: Exception) -> ApiError:
    """Returns the error for a failure of the gateway itself, which is not counted against the agent."""
    log.error("internal error while handling a request", exc_info=error)
    if session is not None:
        session.engine_error = f"internal gateway error: {error!r}"
    return ApiError(
        f"internal gateway error while handling the request ({type(error).__name__}); see the gateway log"
    )
