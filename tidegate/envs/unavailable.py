"""Distinguishes failures of a service that a reward calls from failures of the reward itself."""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.errors import InfrastructureError

CONNECTION_ERRORS = {
    "APIConnectionError", "ClientConnectionError", "ConnectionError", "Timeout", "TransportError",
    "gaierror",
}  # fmt: skip
"""Base classes of connection errors in openai, anthropic, aiohttp, the standard library, requests and httpx.
They are compared by name, so that no library is imported for it."""
TOO_MANY_REQUESTS = 429


def is_unavailable(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, is that of a service that is out of order.

    It is an InfrastructureError, an error of a connection, or has the HTTP status 429 or 500 and above.
    """
    return any(map(_is_outage, _chain(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, InfrastructureError):
        return True
    status = _status(error)
    if status is not None:
        return status == TOO_MANY_REQUESTS or status >= 500
    return not CONNECTION_ERRORS.isdisjoint(base.__name__ for base in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a client library has."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            if isinstance(status := getattr(holder, name, None), int) and status >= 100:
                return status
    return None
