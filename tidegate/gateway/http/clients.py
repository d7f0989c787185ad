"""Serves the calls of clients with a project key, which form groups of episodes (docs/groups.md)."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.errors import GatewayError
from tidegate.gateway.clients.conversations import Conversations
from tidegate.gateway.clients.groups import ClientGroups
from tidegate.gateway.clients.protection import check_reward
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http import schemas
from tidegate.gateway.http.base import JsonEndpoint, bearer_key, respond
from tidegate.gateway.ids import api_key_of
from tidegate.gateway.turns.redaction import redact_text, redact_value
from tidegate.gateway.turns.request_reader import read_body
from tidegate.service import exact

LONGEST_WAIT_S = 60.0
_GROUP = re.compile(r"[A-Za-z0-9_-]{1,64}")


def routes(gateway: Gateway, groups: ClientGroups, conversations: Conversations) -> list[Route]:
    """Returns the routes that a project key opens, except those of the dialects."""
    calls = ClientRoutes(groups, conversations)
    return [
        Route("/v1/feedback", JsonEndpoint(gateway, calls.feedback), methods=["POST"]),
        Route("/v1/conversations/{name:path}", JsonEndpoint(gateway, calls.erase), methods=["DELETE"]),
        Route("/v1/groups/{group}/episodes", JsonEndpoint(gateway, calls.open_episode), methods=["POST"]),
        Route("/v1/groups/{group}/seal", JsonEndpoint(gateway, calls.seal), methods=["POST"]),
        Route("/v1/groups/{group}", JsonEndpoint(gateway, calls.show), methods=["GET"]),
        Route("/v1/groups/{group}", JsonEndpoint(gateway, calls.drop), methods=["DELETE"]),
    ]


class ClientRoutes:
    """Handlers of the routes."""

    def __init__(self, groups: ClientGroups, conversations: Conversations) -> None:
        self._groups = groups
        self._conversations = conversations

    async def feedback(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        client = _client(gateway, scope)
        body = schemas.read(schemas.Feedback, await read_body(receive, small=True))
        check_reward(body.reward(), gateway.options.reward_range)
        comment, correction = (_kept(gateway, text) for text in (body.comment, body.correction))
        group = await self._conversations.feedback(
            client, body.id, body.name, body.reward(), body.reply_only, comment, correction
        )
        await respond(send, 200, exact.dumps({"group": group}))

    async def erase(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        client = _client(gateway, scope)
        await read_body(receive, small=True)
        group, again = await self._conversations.erase(client, str(scope["path_params"]["name"]))
        await respond(send, 200, exact.dumps({"group": group, "already_erased": again}))

    async def open_episode(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        client, group = _authenticate(gateway, scope)
        body = schemas.read(schemas.ClientEpisodeRequest, await read_body(receive, small=True))
        session, key = await self._groups.open_episode(
            client, group, schemas.storable(body.task_id), _redacted(gateway, body.metadata), body.key
        )
        root = gateway.options.public_url or str(Request(scope).base_url).rstrip("/")
        row = {
            "episode": session.id,
            "base_url": f"{root}/s/{session.id}/v1",
            "api_key": api_key_of(key, gateway.options.id_prefix),
            "finish_key": key,
            "model": gateway.policies.default.model,
            "deadline_s": session.deadline_s,
        }
        await respond(send, 200, exact.dumps(row))

    async def seal(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        client, group = _authenticate(gateway, scope)
        body = schemas.read(schemas.SealClientGroup, await read_body(receive, small=True))
        await self._groups.seal(client, group, body.sessions)
        await respond(send, 200, b"{}")

    async def show(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers when the group has ended, or after `wait_s`; stops waiting if the client disconnects."""
        client, group = _authenticate(gateway, scope)
        wait_s = _wait_s(Request(scope).query_params.get("wait_s", "0"))
        await read_body(receive, small=True)
        showing = asyncio.create_task(self._groups.state(client, group, wait_s))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((showing, gone), return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                state = showing.result()
                row: dict[str, Any] = {"group": group, "state": state.state, "ended": state.ended}
                await respond(send, 200, exact.dumps(row | {"why": state.why}))
        finally:
            for task in (showing, gone):
                task.cancel()
            await asyncio.gather(showing, gone, return_exceptions=True)

    async def drop(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        client, group = _authenticate(gateway, scope)
        await self._groups.drop(client, group)
        await respond(send, 200, b"{}")


def _authenticate(gateway: Gateway, scope: Scope) -> tuple[str, str]:
    """Returns the name of the request's project key, and the group of its path. Raises GatewayError."""
    client = _client(gateway, scope)
    group = str(scope["path_params"]["group"])
    if not _GROUP.fullmatch(group):
        raise GatewayError(f"a group's name has 1 to 64 letters, digits, - or _; not {group!r}", status=400)
    return client, group


def _redacted(gateway: Gateway, metadata: dict[str, Any]) -> dict[str, Any]:
    redaction = gateway.options.redact
    if redaction is None:
        return metadata
    redacted: dict[str, Any] = redact_value(metadata, redaction, free=True)
    return redacted


def _kept(gateway: Gateway, text: str | None) -> str | None:
    """Returns a text as it may be recorded."""
    if text is None:
        return None
    text, redaction = schemas.storable(text), gateway.options.redact
    return text if redaction is None else redact_text(text, redaction)


def _client(gateway: Gateway, scope: Scope) -> str:
    client = gateway.keys.name_of(bearer_key(scope))
    if client is None:
        how = (
            "`tidegate keys create NAME` adds one to the file gateway.keys and prints it"
            if gateway.keys.required
            else "the gateway has none, as gateway.keys is not set"
        )
        raise GatewayError(f"this route needs a project key of this gateway: {how}", status=401)
    return client


def _wait_s(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        # NaN fails the comparison below, so both faults get one message.
        wait_s = math.nan
    if not 0 <= wait_s <= LONGEST_WAIT_S:
        raise GatewayError(f"wait_s is {text!r}, not seconds from 0 to {LONGEST_WAIT_S:g}", status=400)
    return wait_s
