"""Connects to a Tinker service. The SDK is imported here alone, with the first connection."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tidegate.errors import ConfigError, StartError
from tidegate.program import advise_extra
from tidegate.service.api_key import key_from_environment
from tidegate.settings.tinker import TinkerService

T = TypeVar("T")
KEY = "TINKER_API_KEY"
NO_KEY = "tml-none"
"""Given to a service without keys, as the SDK needs one."""
SNAPSHOT = "tinker.json"
"""File in a version's directory: `base_model`, `sampler`, the path of the snapshot, and `state`, that of the
state with the same weights."""


@cache
def _environment_key() -> str | None:
    return key_from_environment(KEY)


def service_key(settings: TinkerService) -> str:
    """Return the key of the service.

    Raises:
        ConfigError: The file cannot be read, or a service without an address has no key.
    """
    if settings.api_key_file is not None:
        try:
            return settings.api_key_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"trainer.tinker.api_key_file = {settings.api_key_file}: {error.strerror}; name the file "
                "with the key of the service"
            ) from None
    if (key := _environment_key()) is not None:
        return key
    if settings.base_url is None:
        raise ConfigError(
            f"the Tinker service needs a key: set {KEY} in the environment, or trainer.tinker.api_key_file"
        )
    return NO_KEY


def sdk() -> Any:
    """Return the SDK's module. Raises StartError if it is not installed."""
    try:
        import tinker
    except ModuleNotFoundError as error:
        if error.name != "tinker":
            raise
        raise StartError(f'trainer.backend = "tinker" needs the SDK: {advise_extra("tinker")}') from None
    return tinker


def connect(settings: TinkerService, key: str, *, once_s: float | None = None) -> Any:
    """Open a session at the service, and return the SDK's ServiceClient.

    Args:
        settings: The service.
        key: Its key.
        once_s: Send each call once, and again for so many seconds if the service refuses it for its rate.
            None: as the SDK does, which repeats calls whose reply was lost, with the same sequence number; a
            service that ignores these numbers, such as skyrl-tx 0.3, would take a step twice.

    Raises:
        StartError: The SDK is not installed, or is one whose repetitions cannot be switched off.
    """
    tinker = sdk()
    url = {} if settings.base_url is None else {"base_url": settings.base_url}
    client = tinker.ServiceClient(api_key=key, max_retries=10 if once_s is None else 0, **url)
    if once_s is not None:
        if not hasattr(getattr(client, "holder", None), "execute_with_retries"):
            raise StartError(
                f"the SDK tinker {getattr(tinker, '__version__', '')} has no "
                "`ServiceClient.holder.execute_with_retries`, without which a lost reply could take a step "
                f"twice: {advise_extra('tinker')}, which has a version that was tested"
            )

        async def send(call: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
            deadline = time.monotonic() + once_s
            while True:
                try:
                    return await call(*arguments, **options)
                except tinker.RateLimitError:  # refused before it had an effect
                    if time.monotonic() >= deadline:
                        raise
                    await asyncio.sleep(1.0)

        client.holder.execute_with_retries = send
    return client


def read_snapshot(directory: Path) -> tuple[str | None, str | None]:
    """Return the paths of a version's snapshot and state; None for the base model.

    Raises:
        OSError: The file cannot be read.
        ValueError: It names no snapshot.
    """
    file = directory / SNAPSHOT
    if not file.is_file():
        return None, None
    named = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(named["sampler"], str):
        raise ValueError(f"{file} names no snapshot")
    return named["sampler"], named.get("state")


def unique_name(kind: str) -> str:
    """Return a name that no other call has: what is saved again does not meet the file of a lost call."""
    return f"{kind}-{uuid.uuid4().hex[:12]}"


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an SDK's error, or of its cause."""
    return getattr(error, "status_code", getattr(error.__cause__, "status_code", None))
