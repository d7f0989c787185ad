"""An httpx transport on the HTTP/1.1 client of this package: the same client for less CPU time.

The openai SDK uses httpx, from version 3 on httpx2; both have the same interface, and the module in use is
passed to the functions here.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.connection import Http1Reply
from tidegate.service.http1.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    InvalidReply,
    ReadTimeout,
)
from tidegate.service.http1.origin import Origin

_KEEPALIVE_S = 30.0
"""The gateway keeps idle connections for longer."""
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_HEADERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [^\x00\r\n]*\r\n)*")
_PLAIN = frozenset({"timeout"})
"""Extensions of a request that are supported here."""


def new_client(httpx: Any, **options: Any) -> Any:
    """Returns an `AsyncClient` that sends plain requests with the HTTP/1.1 client of this package.

    Other requests (HEAD, streamed bodies, extensions such as `trace`) and those through a proxy that the
    environment names go through the transport that the client would have anyway. There is no limit of
    connections.

    Args:
        httpx: The module, httpx or httpx2.
        options: Arguments of `AsyncClient`.
    """

    class LeanAsyncClient(httpx.AsyncClient):  # type: ignore[misc]
        def _init_transport(self, *arguments: Any, **keywords: Any) -> Any:
            return _transport_class(httpx)(super()._init_transport(*arguments, **keywords))

    return LeanAsyncClient(**options)


def _transport_class(httpx: Any) -> Any:
    class LeanTransport(httpx.AsyncBaseTransport):  # type: ignore[misc]
        """Sends plain requests itself, and others with the transport `other`."""

        def __init__(self, other: Any) -> None:
            self._other = other
            self._client = Http1Client(connect_s=5.0, keepalive_s=_KEEPALIVE_S, tls=httpx.create_ssl_context)

        async def handle_async_request(self, request: Any) -> Any:
            data = _plain(httpx, request)
            if data is None:
                return await self._other.handle_async_request(request)
            url, timeout = request.url, request.extensions.get("timeout", {})
            connect_s = timeout.get("connect")
            tls = url.scheme == "https"
            origin = Origin(url.raw_host.decode("ascii"), url.port or (443 if tls else 80), tls)
            with _errors(httpx):
                reply = await self._client.send(
                    origin,
                    data,
                    connect_s=math.inf if connect_s is None else connect_s,
                    read_s=timeout.get("read"),
                )
            version = {"http_version": b"HTTP/1.1"}
            return httpx.Response(reply.status, headers=reply.headers, stream=Body(reply), extensions=version)

        async def aclose(self) -> None:
            await self._client.close()
            await self._other.aclose()

    class Body(httpx.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, reply: Http1Reply) -> None:
            self._reply = reply

        async def __aiter__(self) -> AsyncIterator[bytes]:
            with _errors(httpx):
                while piece := await self._reply.piece():
                    yield piece

        async def aclose(self) -> None:
            self._reply.close()

    return LeanTransport


def _plain(httpx: Any, request: Any) -> bytes | None:
    """Returns the bytes of a request; None if it is not plain."""
    if request.method not in _METHODS or request.url.scheme not in ("http", "https"):
        return None
    if not request.extensions.keys() <= _PLAIN:
        return None
    try:
        body: bytes = request.content
    except httpx.RequestNotRead:
        return None
    if "transfer-encoding" in request.headers or "expect" in request.headers:
        return None
    pairs = request.headers.raw
    headers = b"".join([b"%b: %b\r\n" % pair for pair in pairs])
    if headers.count(b"\n") != len(pairs) or not _HEADERS.fullmatch(headers):
        return None  # the other transport refuses it
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (request.method.encode(), request.url.raw_path, headers, body)


@contextlib.contextmanager
def _errors(httpx: Any) -> Iterator[None]:
    """Raises the exceptions of httpx."""
    try:
        yield
    except ConnectTimeout as error:
        raise httpx.ConnectTimeout(str(error)) from error
    except ReadTimeout as error:
        raise httpx.ReadTimeout(str(error)) from error
    except ConnectFailed as error:
        raise httpx.ConnectError(str(error)) from error
    except ConnectionLost as error:
        kind = httpx.RemoteProtocolError if error.errno is None else httpx.ReadError
        raise kind(str(error)) from error
    except InvalidReply as error:
        raise httpx.RemoteProtocolError(str(error)) from error
