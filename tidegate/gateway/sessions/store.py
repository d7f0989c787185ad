"""Indexes the sessions of one gateway."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from tidegate.gateway.errors import wrong_key
from tidegate.gateway.ids import hash_key
from tidegate.gateway.sessions.session import GatewaySession


class SessionStore:
    """Sessions by id, by key and by group."""

    def __init__(self) -> None:
        self._by_id: dict[str, GatewaySession] = {}
        self._by_key: dict[bytes, GatewaySession] = {}
        self._by_group: dict[str, dict[str, GatewaySession]] = {}
        self._numbers = 0
        self.on_forgotten: Callable[[GatewaySession], None] = lambda _: None
        """Called when a session is deleted, for whatever reason."""

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[GatewaySession]:
        return list(self._by_id.values())

    def next_number(self) -> int:
        """Returns a number that no session of this store has had."""
        self._numbers += 1
        return self._numbers

    def add(self, session: GatewaySession) -> None:
        self._numbers = max(self._numbers, session.number)
        self._by_id[session.id] = session
        self._by_key[session.key_hash] = session
        if session.group_id is not None:
            self._by_group.setdefault(session.group_id, {})[session.id] = session

    def set_key(self, session: GatewaySession, key: str) -> None:
        """Replaces a session's key."""
        session.former_keys.append(session.key_hash)
        session.key_hash = hash_key(key)
        self._by_key[session.key_hash] = session

    def get(self, session_id: str) -> GatewaySession | None:
        return self._by_id.get(session_id)

    def with_key(self, key: str) -> GatewaySession | None:
        return self._by_key.get(hash_key(key))

    def of_group(self, group_id: str) -> list[GatewaySession]:
        return list(self._by_group.get(group_id, {}).values())

    def groups(self) -> dict[str, list[GatewaySession]]:
        return {group_id: list(members.values()) for group_id, members in self._by_group.items()}

    def authenticate(self, key: str | None, session_id: str | None) -> GatewaySession:
        """Returns the session of a key. Raises the same ApiError whatever the cause. Only hashes are stored,
        so the duration of a look-up reveals nothing about a key."""
        if not key:
            raise wrong_key()
        hashed = hash_key(key)
        session = self._by_id.get(session_id) if session_id is not None else self.with_key(key)
        if session is None or not hmac.compare_digest(session.key_hash, hashed):
            raise wrong_key()
        return session

    def forget(self, session: GatewaySession) -> None:
        session.stop("it was deleted")
        self._by_id.pop(session.id, None)
        # Former keys stay in the index to recognise repeated requests, and would leak.
        for key_hash in (session.key_hash, *session.former_keys):
            self._by_key.pop(key_hash, None)
        members = self._by_group.get(session.group_id or "")
        if members is not None:
            members.pop(session.id, None)
            if not members:
                del self._by_group[session.group_id or ""]
        self.on_forgotten(session)
