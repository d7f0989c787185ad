"""How requests are served with less work: joined writes, and routes without ASGI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.serving import served
from tests.waiting import eventually
from tidegate.service.direct.asgi import serve_endpoint
from tidegate.service.direct.protocol import _JoiningTransport
from tidegate.service.direct.request import MAX_REQUEST, CompleteRequest, DirectRequest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Recording:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_head_and_body_are_one_write() -> None:
    transport = Recording()
    joined = _JoiningTransport(transport, asyncio.get_running_loop())
    joined.write(HEAD)
    joined.write(b"ok")
    joined.write(b"more")
    await asyncio.sleep(0)
    assert transport.written == [HEAD + b"ok", b"more"]


async def test_a_head_without_a_body_is_written_in_the_next_iteration_or_before_the_close() -> None:
    transport = Recording()
    joined = _JoiningTransport(transport, asyncio.get_running_loop())
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert transport.written == [HEAD]
    joined.write(HEAD)
    joined.close()
    assert transport.written == [HEAD, HEAD]
    assert joined.is_closing()


class Echo:
    """Answers `/echo` directly, and by ASGI; what the body says happens."""

    def __init__(self) -> None:
        self.open: list[DirectRequest] = []
        self.gone: list[bytes] = []
        self.scopes: list[dict[str, object]] = []
        self.more = asyncio.Event()

    def direct(self, request: DirectRequest) -> bool:
        word = request.body
        if word == b"refused":
            return False
        if word == b"raises":
            raise ValueError("planted")
        if word == b"fails":
            request.start(self.fail())
        elif word.startswith(b"later"):
            request.on_disconnect = lambda: self.gone.append(word)
            self.open.append(request)
        else:
            request.respond(200, b'["direct","%s"]' % word)
        return True

    def named(self, request: DirectRequest) -> bool:
        word = b"%b?%b" % (request.parameter.encode(), request.query)
        request.respond(200, b'["named","%s"]' % word)
        return True

    def endpoint(self, request: DirectRequest) -> bool:
        return serve_endpoint(self.parts, request)

    async def parts(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI endpoint that sends what `self.sent` has, and then ends as the body says."""
        word = (await receive())["body"]
        self.scopes.append(dict(scope))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"a/b")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        if word == b"raises":
            raise ValueError("planted")
        if word == b"waits":
            self.gone.append((await receive())["type"].encode())
            return
        if word == b"goes on":
            await self.more.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async def fail(self) -> None:
        raise ValueError("planted")

    async def asgi(self, request: Request) -> Response:
        return JSONResponse(["asgi", (await request.body()).decode()])


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[tuple[Echo, asyncio.StreamReader, asyncio.StreamWriter]]:
    echo = Echo()
    app = Starlette(routes=[Route("/echo", echo.asgi, methods=["POST"])])
    direct = {
        b"POST /echo HTTP/1.1": echo.direct,
        b"GET /named/{}/part HTTP/1.1": echo.named,
        b"POST /parts/{}/all HTTP/1.1": echo.endpoint,
    }
    async with served(app, direct=direct) as url:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        async with asyncio.timeout(20):
            yield echo, reader, writer
    writer.close()


def post(body: bytes, extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST /echo HTTP/%s\r\nHost: h\r\ncontent-length: %d\r\n%s\r\n"
    return head % (version, len(body), extra) + body


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def test_a_plain_request_in_one_piece_is_served_directly() -> None:
    async with echoing() as (_, reader, writer):
        for number in (b"1", b"2"):
            writer.write(post(number))
            assert await response(reader) == (200, b'["direct","%s"]' % number)


@pytest.mark.parametrize(
    "data",
    [
        post(b"a", b"X-Forwarded-Proto: https\r\n"),
        post(b"a", b"Connection: close\r\n"),
        post(b"a", version=b"1.0"),
        post(b"refused"),
        b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\n\r\na",
        post(b"a" * MAX_REQUEST),
    ],
    ids=["proxied", "last", "HTTP 1.0", "refused", "chunked", "without a host", "large"],
)
async def test_other_requests_are_served_by_asgi(data: bytes) -> None:
    async with echoing() as (_, reader, writer):
        writer.write(data)
        status, body = await response(reader)
        assert (status, body[:7]) == (200, b'["asgi"')


@pytest.mark.parametrize("cut", [5, 25, len(post(b"text")) - 2])
async def test_a_request_in_two_pieces_is_served_by_asgi_and_the_next_directly(cut: int) -> None:
    data = post(b"text")
    async with echoing() as (_, reader, writer):
        writer.write(data[:cut])
        await asyncio.sleep(0.01)  # most likely they arrive as two; as one they are served, too
        writer.write(data[cut:])
        status, body = await response(reader)
        assert (status, body[-7:]) == (200, b',"text"]'[-7:])
        writer.write(data)
        assert await response(reader) == (200, b'["direct","text"]')


def test_only_one_complete_request_is_parsed() -> None:
    data = post(b"text")
    assert CompleteRequest.parse(data) is not None
    for cut in range(1, len(data)):
        assert CompleteRequest.parse(data[:cut]) is None, cut
    assert CompleteRequest.parse(data * 2) is None
    assert CompleteRequest.parse(data + b"P") is None
    assert CompleteRequest.parse(data.replace(b"Host", b"Ho st")) is None


async def test_a_request_inside_another_ones_body_is_no_request() -> None:
    inner = post(b"inner")
    async with echoing() as (_, reader, writer):
        data = post(inner + b"!")
        writer.write(data[: -len(inner) - 1])
        await asyncio.sleep(0.05)
        writer.write(inner)
        await asyncio.sleep(0.05)
        writer.write(b"!")
        status, body = await response(reader)
        assert (status, body[:7]) == (200, b'["asgi"')
        assert b"inner" in body


async def test_requests_that_arrive_while_one_is_open_are_answered_after_it() -> None:
    async with echoing() as (echo, reader, writer):
        writer.write(post(b"later"))
        await eventually(lambda: echo.open)
        writer.write(post(b"second") + post(b"third"))
        writer.write(post(b"fourth"))
        await asyncio.sleep(0.05)
        echo.open[0].respond(200, b'"first"')
        bodies = [(await response(reader))[1] for _ in range(4)]
        assert bodies[0] == b'"first"'
        assert [b"second" in bodies[1], b"third" in bodies[2], b"fourth" in bodies[3]] == [True] * 3
        echo.open[0].respond(200, b'"twice"')  # nothing
        writer.write(post(b"fifth"))
        assert await response(reader) == (200, b'["direct","fifth"]')


async def test_a_disconnect_ends_an_open_request() -> None:
    async with echoing() as (echo, _, writer):
        writer.write(post(b"later"))
        await eventually(lambda: echo.open)
        writer.close()
        await eventually(lambda: echo.gone == [b"later"])
        echo.open[0].respond(200, b"late")  # nothing


async def test_a_server_that_stops_answers_open_requests() -> None:
    async with echoing() as (echo, reader, writer):
        writer.write(post(b"later"))
        await eventually(lambda: echo.open)
        all_of_it = asyncio.create_task(reader.read())
    answer = await all_of_it
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the server stops" in answer
    assert echo.gone == [b"later"]


@pytest.mark.parametrize("word", [b"raises", b"fails"])
async def test_an_error_of_a_route_is_logged_and_answered(
    word: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with echoing() as (_, reader, writer):
        writer.write(post(word))
        assert (await response(reader))[0] == 500
        assert "planted" in caplog.text
        writer.write(post(b"next"))
        assert await response(reader) == (200, b'["direct","next"]')


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/named/a-1_b.c/part", b'["named","a-1_b.c?"]'),
        (b"/named/x/part?wait_s=1.5&a=/", b'["named","x?wait_s=1.5&a=/"]'),
    ],
)
async def test_a_route_has_the_name_in_its_path_and_the_query(path: bytes, expected: bytes) -> None:
    async with echoing() as (_, reader, writer):
        writer.write(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % path)
        assert await response(reader) == (200, expected)


@pytest.mark.parametrize("path", [b"/named/a%20b/part", b"/named//part", b"/named/x/other", b"/named/x"])
async def test_other_paths_are_left_to_asgi(path: bytes) -> None:
    async with echoing() as (_, reader, writer):
        writer.write(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % path)
        assert (await response(reader))[0] == 404


PARTS = b"POST /parts/s1/all HTTP/1.1\r\nHost: h\r\ncontent-length: %d\r\n\r\n%b"
CHUNKS = b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_an_endpoint_streams_its_response_in_chunks() -> None:
    async with echoing() as (echo, reader, writer):
        for _ in range(2):  # the connection is kept
            writer.write(PARTS % (2, b"go"))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b"transfer-encoding: chunked" in head
            assert b"content-type: a/b" in head
            assert b"content-length" not in head
            assert await reader.readexactly(len(CHUNKS)) == CHUNKS
        assert [scope["path_params"] for scope in echo.scopes] == [{"session_id": "s1"}] * 2


async def test_an_error_within_a_response_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with echoing() as (_, reader, writer):
        writer.write(PARTS % (6, b"raises"))
        assert (await reader.read()).endswith(b"3\r\none\r\n")
        assert "planted" in caplog.text


async def test_an_endpoint_receives_the_disconnect() -> None:
    async with echoing() as (echo, reader, writer):
        writer.write(PARTS % (5, b"waits"))
        await reader.readuntil(b"one\r\n")
        writer.close()
        await eventually(lambda: echo.gone == [b"http.disconnect"])


async def test_a_server_that_stops_completes_the_response_of_an_endpoint() -> None:
    async with echoing() as (echo, reader, writer):
        writer.write(PARTS % (7, b"goes on"))
        await reader.readuntil(b"one\r\n")
        rest = asyncio.create_task(reader.read())
        asyncio.get_running_loop().call_later(0.05, echo.more.set)
    assert (await rest).endswith(b"3\r\ntwo\r\n0\r\n\r\n")
