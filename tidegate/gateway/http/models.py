"""Serves lists of models, and counts of tokens in Anthropic's dialect."""

from __future__ import annotations

import math

import orjson
from starlette.types import Receive, Scope, Send

from tidegate.gateway.dialects import chat, messages
from tidegate.gateway.errors import ApiError, unknown_model
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.base import (
    authenticate,
    client_name,
    internal_error,
    redacted,
    refuse,
    replay,
    respond,
)
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.request_reader import ClientGone, RequestReader, read_body


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
        except Exception as error:  # noqa: BLE001 - logged and returned to the client
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
