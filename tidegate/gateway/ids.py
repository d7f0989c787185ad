"""Generates ids of calls, engine requests, tool calls and sessions, and session keys."""

from __future__ import annotations

import functools
import hmac
import random
import secrets
from hashlib import sha256

_RANDOM = random.Random()  # not the shared generator, which other code may seed


def unique_name() -> str:
    """Returns 32 unique hexadecimal digits. Not a secret: they are predictable from earlier ones."""
    return f"{_RANDOM.getrandbits(128):032x}"


@functools.lru_cache(8)  # each poll checks it
def agents_key(admin_key: str | None) -> str:
    """Returns the worker key of a trainer's own agents, from which the admin key cannot be computed."""
    return hmac.new((admin_key or "").encode(), b"agents", sha256).hexdigest()


def hash_key(key: str) -> bytes:
    return sha256(key.encode()).digest()


def new_key(prefix: str = "", secret: str | None = None) -> str:
    return f"tg-{prefix}{secret or secrets.token_urlsafe(24)}"


def new_finish_key() -> str:
    """Returns the secret by which an episode is finished; its program never gets it."""
    return secrets.token_urlsafe(24)


def api_key_of(finish_key: str, prefix: str = "") -> str:
    """Returns the API key of the episode, from which the key that finishes it cannot be computed."""
    return new_key(prefix, sha256(b"episode " + finish_key.encode("utf-8", "replace")).hexdigest())


def new_id(prefix: str = "") -> str:
    return prefix + secrets.token_hex(12)
