"""Awaits replies of actors, with a timeout and with errors that name the actor."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from tidegate.errors import StartError, TidegateError

REPLY_TIMEOUT_S = 30.0


class LostError(StartError):
    """An actor or its node exited or does not respond. `for_good`: Ray will not restart it."""

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


async def wait_for_reply(call: Any, name: str, within_s: float | None = REPLY_TIMEOUT_S) -> Any:
    """Await an actor's reply to `call`; `within_s` None waits without a timeout.

    Raises LostError if the actor is lost or does not reply in time, the actor's own TidegateErrors, and
    StartError for its other errors.
    """
    try:
        async with asyncio.timeout(within_s):
            return await call
    except TimeoutError:
        raise LostError(f"{name} did not respond within {within_s:g} s") from None
    except RayError as error:
        raise translate(error, name) from error


def translate(error: RayError, name: str) -> TidegateError:
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, TidegateError):
            return cause
        return StartError(f"{name}: {type(cause).__name__}: {cause}")
    if isinstance(error, ActorUnavailableError):
        return LostError(f"{name} was lost: {_first_line(error)}")
    if isinstance(error, ActorDiedError) and "creation task" in str(error):
        return LostError(
            f"{name} could not be created on its node: {_last_line(error)}. "
            "Is this version of tidegate installed there?",
            for_good=True,
        )
    return LostError(f"{name} was lost: {_first_line(error)}", for_good=isinstance(error, RayActorError))


def _first_line(error: RayError) -> str:
    return str(error).strip().partition("\n")[0]


def _last_line(error: RayError) -> str:
    return str(error).strip().rpartition("\n")[2].strip()
