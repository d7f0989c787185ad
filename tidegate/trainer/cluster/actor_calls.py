"""Calls of actors: each with a deadline, and with errors that say which actor it was."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from tidegate.errors import StartError, TidegateError

ANSWER_S = 30.0


class LostError(StartError):
    """An actor's process died, or its node, or says nothing. `for_good`: Ray does not start it again."""

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


async def answer(call: Any, name: str, within_s: float | None = ANSWER_S) -> Any:
    """What an actor says to a call under way; None waits as long as the actor lives.

    Raises LostError, also where it says nothing in time, TidegateErrors as it raised them, and StartError for
    what nobody foresaw.
    """
    try:
        async with asyncio.timeout(within_s):
            return await call
    except TimeoutError:
        raise LostError(f"{name} did not answer within {within_s:g} s") from None
    except RayError as error:
        raise meaning(error, name) from error


def meaning(error: RayError, name: str) -> TidegateError:
    """What an error of Ray's means for the run."""
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, TidegateError):
            return cause
        return StartError(f"{name}: {type(cause).__name__}: {cause}")
    if isinstance(error, ActorUnavailableError):
        return LostError(f"{name} was lost: {_first_line(error)}")
    if isinstance(error, ActorDiedError) and "creation task" in str(error):
        return LostError(
            f"{name} could not be made on its node: {_last_line(error)}. Is this tidegate installed there?",
            for_good=True,
        )
    return LostError(f"{name} was lost: {_first_line(error)}", for_good=isinstance(error, RayActorError))


def _first_line(error: RayError) -> str:
    return str(error).strip().partition("\n")[0]


def _last_line(error: RayError) -> str:
    return str(error).strip().rpartition("\n")[2].strip()
