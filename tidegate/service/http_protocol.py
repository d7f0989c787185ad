"""uvicorn's HTTP protocol, which writes the head of a response together with the first part of its body."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD = b"HTTP/1."


class _JoiningTransport:
    """Holds the head of a response back until the next write, or the next iteration of the event loop.

    uvicorn writes head and body separately, and each write is a system call, which costs a short response
    more than all else.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            self._transport.write(self._head + data)
            self._head = b""
        elif data.startswith(_HEAD) and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class JoiningProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=…)`."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_JoiningTransport(transport, self.loop))  # type: ignore[arg-type]
