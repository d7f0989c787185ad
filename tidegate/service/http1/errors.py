"""Errors of the HTTP/1.1 client."""

from __future__ import annotations


class ConnectTimeout(TimeoutError):
    """A connection was not established in time."""


class ConnectFailed(ConnectionError):
    """A connection was refused, or the host name could not be resolved. `errno` is that of the cause."""


class ReadTimeout(TimeoutError):
    """Nothing was received in time."""


class ConnectionLost(ConnectionError):
    """The server closed the connection before its reply was complete. `errno` is set if it was reset."""


class InvalidReply(OSError):
    """A reply is not HTTP, or exceeds a limit."""
