"""Groups that clients form: their episodes, their sealing, and their states."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.errors import RUN_ENDED, GatewayError
from tidegate.gateway.engines.fair_queue import has_room
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.ids import api_key_of, new_finish_key
from tidegate.gateway.sessions.session import GatewaySession, SessionRequest
from tidegate.types import Task

MAX_EPISODES = 1024
"""Limit of a group's episodes."""
TELL_S = 6.0
"""Seconds for which an ended run waits for its clients' next calls, which are at most 5 s apart."""


@dataclass(frozen=True, slots=True)
class ClientGroupState:
    """State of a group: `open`, `ready` or `leased`; once it has ended, the state in which it did."""

    state: str
    ended: bool
    why: str | None = None


class ClientGroups:
    """The groups of one gateway's clients. A group's id is the client's name, a dot and the group's name.

    A client's groups that have not ended count against `GatewayOptions.max_client_groups`, all clients'
    together: the gate that the trainer's own groups have in admission. A client below its equal share may
    always begin one.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._told: set[str] = set()
        """Clients that know that the run has ended."""
        self._heard = asyncio.Event()

    async def open_episode(
        self, client: str, name: str, task_id: str, metadata: dict[str, Any], secret: str | None
    ) -> tuple[GatewaySession, str]:
        """Opens an episode of a group, which begins with its first one; returns it with its finish key.

        A repeated request with the same `secret` returns the same episode. Raises GatewayError: 429 if too
        many groups have not ended, 409 if the group is a conversation or has too many episodes.
        """
        options, group_id = self._gateway.options, f"{client}.{name}"
        finish_key = secret or new_finish_key()
        members = self._gateway.sessions.of_group(group_id)
        if members and members[0].conversation is not None:
            raise GatewayError(f"group {name!r} is a conversation, which has no episodes", status=409)
        if len(members) >= MAX_EPISODES:
            raise GatewayError(f"group {name!r} has {len(members)} episodes, which is the limit", status=409)
        if not members:
            self._check_run(client, name)
        held = self._unended()
        if not members and not has_room(held, client, options.max_client_groups, least=1):
            raise GatewayError(
                f"group {name!r} cannot begin: {held.total()} groups of clients have not ended, "
                f"{held[client]} of them of this key, which is the capacity that the staleness bound leaves; "
                "try again when one has",
                status=429,
            )
        request = SessionRequest(
            task=Task(task_id, "", []),
            sampling=options.client_sampling,
            deadline_s=options.client_deadline_s,
            group_id=group_id,
            slot=1 + max((member.slot or 0 for member in members), default=-1),
            metadata=metadata,
            # A repeated request finds its episode by this key.
            key=api_key_of(finish_key).removeprefix("tg-"),
        )
        session, _ = await self._gateway.open_session(request, client)
        return session, finish_key

    def _unended(self) -> Counter[str]:
        """Returns the number of groups that have not ended by client."""
        first = [members[0] for members in self._gateway.sessions.groups().values()]
        return Counter(one.client for one in first if one.client is not None and one.conversation is None)

    async def seal(self, client: str, name: str, session_ids: Sequence[str]) -> None:
        """Offers a group to the trainer, with those of its episodes that are named. Idempotent."""
        group_id = f"{client}.{name}"
        members = self._gateway.sessions.of_group(group_id)
        task_id = members[0].task.id if members and members[0].task is not None else ""
        await self._gateway.seal(group_id, task_id, list(session_ids))

    async def state(self, client: str, name: str, wait_s: float) -> ClientGroupState:
        """Returns the state of a group, after at most `wait_s` seconds or when it has ended.

        Raises GatewayError (404) for an unknown group.
        """
        group_id, groups = f"{client}.{name}", self._gateway.groups
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await groups.wait_for_end(group_id, lambda: self._known(group_id))
        if (end := groups.end_reason(group_id)) is not None:
            state, _, why = end.partition(": ")
            return ClientGroupState(state, True, why or None)
        if (sealed := groups.get(group_id)) is not None:
            self._check_run(client, name)
            return ClientGroupState(sealed.state, False)
        if not self._known(group_id):
            raise GatewayError(f"there is no group {name!r}, or its episodes have expired", status=404)
        self._check_run(client, name)
        return ClientGroupState("open", False)

    async def end_run(self, epoch: int, why: str) -> None:
        """Refuses new groups and ends waits for groups, with the reason.

        Returns when all clients with groups know it, at most `TELL_S` later: then the gateway may stop.
        """
        self._told.clear()
        await self._gateway.groups.end_run(epoch, why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                while set(self._unended()) - self._told:
                    self._heard.clear()
                    await self._heard.wait()

    def _check_run(self, client: str, name: str) -> None:
        if (why := self._gateway.groups.run_end) is not None:
            self._told.add(client)
            self._heard.set()
            raise GatewayError(f"{RUN_ENDED} before it trained on group {name!r}: {why}", status=410)

    def _known(self, group_id: str) -> bool:
        return bool(self._gateway.sessions.of_group(group_id))

    async def drop(self, client: str, name: str) -> None:
        """Ends a group that was not sealed, and its episodes; or a conversation. Idempotent.

        Raises GatewayError: 404 if there was no such group, 409 if it is sealed.
        """
        group_id, groups = f"{client}.{name}", self._gateway.groups
        if groups.get(group_id) is not None:
            raise GatewayError(f"group {name!r} is sealed: the trainer may have leased it", status=409)
        if not self._known(group_id) and groups.end_reason(group_id) is None:
            raise GatewayError(f"there is no group {name!r} of this key", status=404)
        await self._gateway.drop(group_id)
