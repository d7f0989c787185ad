"""The HTTP/1.1 client against a server that sends anything, on the event loops of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from tests.scripted_server import Script, Scripted, scripted
from tests.waiting import eventually
from tidegate.service.http1 import client as http1_client
from tidegate.service.http1 import connection as http1_connection
from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.connection import Http1Reply
from tidegate.service.http1.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    InvalidReply,
    ReadTimeout,
)
from tidegate.service.http1.origin import Origin, parse_url

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as made:
        yield made


def on_each_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on each event loop, with a client if it takes one."""
    parameters = dict(inspect.signature(test).parameters)
    takes_client = parameters.pop("client", None) is not None

    @functools.wraps(test)
    def run(runner: asyncio.Runner, **arguments: Any) -> None:
        async def main() -> None:
            client = Http1Client(connect_s=5.0, keepalive_s=3.0)
            try:
                await test(**arguments, **({"client": client} if takes_client else {}))
            finally:
                await client.close()

        runner.run(main())

    own = inspect.Parameter("runner", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*parameters.values(), own])  # type: ignore[attr-defined]
    return run


async def begun(client: Http1Client, url: str, body: bytes = b"{}") -> Http1Reply:
    origin, path, headers = parse_url(url + "/generate")
    head = b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (path.encode(), headers, len(body))
    return await client.send(origin, head + body)


async def post(client: Http1Client, url: str) -> bytes:
    with await begun(client, url) as reply:
        return await reply.read()


def sends(*pieces: bytes, then: str = "wait") -> Script:
    """Answers one request with these pieces, each sent by itself; then waits for the client, or closes."""

    async def script(connection: Scripted) -> None:
        await connection.request()
        for piece in pieces:
            await connection.send(piece)
            await asyncio.sleep(0)
        if then == "reset":
            connection.reset()
        elif then == "wait":
            await connection.until_closed()

    return script


def in_bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"x-a: 1\r\ncontent-length: 11\r\n\r\nhello world"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\nx-trailer: 1\r\n\r\n"


@pytest.mark.parametrize(
    "script",
    [
        sends(LENGTH),
        sends(*in_bytes(LENGTH)),
        sends(CHUNKED),
        sends(*in_bytes(CHUNKED)),
        sends(b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH),
        sends(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", CHUNKED),
        sends(OK + b"\r\nhello", b" world", then="close"),
        sends(b"HTTP/1.0 200 OK\r\n\r\nhello world", then="close"),
        sends(b"HTTP/1.0 200 OK\r\ncontent-length: 11\r\n\r\nhello world", then="close"),
    ],
    ids=[
        "length",
        "length-bytes",
        "chunked",
        "chunked-bytes",
        "100",
        "103",
        "until-close",
        "1.0",
        "1.0-length",
    ],
)
@on_each_loop
async def test_a_reply_in_each_form(client: Http1Client, script: Script) -> None:
    async with scripted(script) as server:
        assert await post(client, server.url) == b"hello world"


@on_each_loop
async def test_a_reply_has_its_status_and_its_headers(client: Http1Client) -> None:
    async with scripted(
        sends(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\ncontent-length: 2\r\n\r\nno")
    ) as server:
        with await begun(client, server.url) as reply:
            assert (reply.status, dict(reply.headers)[b"Retry-After"]) == (503, b"1")
            assert await reply.read() == b"no"


@on_each_loop
async def test_a_reply_without_a_body(client: Http1Client) -> None:
    async with scripted(sends(b"HTTP/1.1 204 No Content\r\n\r\n")) as server:
        assert await post(client, server.url) == b""


@on_each_loop
async def test_a_request_arrives_as_it_was_sent(client: Http1Client) -> None:
    async with scripted() as server:
        with await begun(client, server.url, b"x" * 3_000_000) as reply:
            assert await reply.read() == b"ok"
        [request] = server.connections[0].requests
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
        assert body == b"x" * 3_000_000


@on_each_loop
async def test_a_connection_is_used_again(client: Http1Client) -> None:
    async with scripted() as server:
        for _ in range(3):
            assert await post(client, server.url) == b"ok"
        assert len(server.connections) == 1
        replies = await asyncio.gather(*(post(client, server.url) for _ in range(4)))
        assert (replies, len(server.connections)) == ([b"ok"] * 4, 4)


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"connection: close\r\ncontent-length: 11\r\n\r\nhello world",
        b"HTTP/1.0 200 OK\r\ncontent-length: 11\r\n\r\nhello world",
        LENGTH + OK,
        LENGTH + LENGTH,
        LENGTH + b"surplus",
    ],
    ids=["close", "1.0", "half-a-reply-more", "a-reply-more", "bytes-more"],
)
@on_each_loop
async def test_a_connection_is_not_used_again(client: Http1Client, reply: bytes) -> None:
    async with scripted(sends(reply)) as server:
        assert await post(client, server.url) == b"hello world"
        assert await post(client, server.url) == b"ok"
        await server.connections[0].closed.wait()


@on_each_loop
async def test_bytes_that_nobody_asked_for_close_an_idle_connection(client: Http1Client) -> None:
    more = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.reply()
        await more.wait()
        await connection.send(LENGTH)
        await connection.until_closed()

    async with scripted(script) as server:
        assert await post(client, server.url) == b"ok"
        more.set()
        await server.connections[0].closed.wait()
        assert await post(client, server.url) == b"ok"


async def closing(connection: Scripted) -> None:
    """Answers one request, then closes."""
    await connection.request()
    await connection.reply()


@on_each_loop
async def test_a_connection_that_the_server_closed_while_idle(client: Http1Client) -> None:
    async with scripted(closing, closing) as server:
        assert await post(client, server.url) == b"ok"
        [idle] = idle_connections(client)
        await eventually(lambda: not idle_connections(client))
        assert await post(client, server.url) == b"ok"
        assert idle not in idle_connections(client)


@on_each_loop
async def test_a_close_that_a_late_event_loop_has_not_seen(client: Http1Client) -> None:
    """The server is another thread, so that it closes while the client's event loop is blocked."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        close, closed = threading.Event(), threading.Event()

        def serve() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                connection.recv(2**16)
                connection.sendall(OK + b"content-length: 2\r\n\r\nok")
                close.wait(10)
                connection.close()
                closed.set()

        thread = asyncio.create_task(asyncio.to_thread(serve))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        reply = await begun(client, url)
        assert await reply.read() == b"ok"
        close.set()
        closed.wait(
            10
        )  # blocks the event loop, which has not processed the close when the next request begins
        assert len(idle_connections(client)) == 1
        assert await post(client, url) == b"ok"
        await thread


def block(seconds: float) -> None:
    time.sleep(seconds)


def idle_connections(client: Http1Client) -> list[Any]:
    return [connection for idle in client._idle.values() for connection in idle]


async def closing_at_the_next_request(connection: Scripted) -> None:
    """Closes as the second request arrives, as a server does whose close crossed the request."""
    await connection.request()
    await connection.reply()
    await connection.request()
    connection.reset()


@on_each_loop
async def test_a_request_that_crossed_the_close_of_an_idle_connection(client: Http1Client) -> None:
    async with scripted(closing_at_the_next_request) as server:
        assert await post(client, server.url) == b"ok"
        idle_connections(client)[0].idle_since -= 2.0
        assert await post(client, server.url) == b"ok"
        assert len(server.connections) == 2


@on_each_loop
async def test_a_server_that_exits_within_a_request_is_a_failure(client: Http1Client) -> None:
    """It had been in use just before, so that it did not close an idle connection."""
    async with scripted(closing_at_the_next_request) as server:
        assert await post(client, server.url) == b"ok"
        with pytest.raises(ConnectionLost, match="without a reply"):
            await post(client, server.url)
        assert len(server.connections) == 1


@pytest.mark.parametrize("part", [b"HTTP/1.1 200", b"HTTP/1.1 100 Continue\r\n\r\n"])
@on_each_loop
async def test_a_request_is_not_sent_again_once_something_was_received(
    client: Http1Client, part: bytes
) -> None:
    async def script(connection: Scripted) -> None:
        await closing(connection)
        await connection.request()
        await connection.send(part)

    async with scripted(script) as server:
        assert await post(client, server.url) == b"ok"
        idle_connections(client)[0].idle_since -= 2.0
        with pytest.raises(ConnectionLost, match="in the middle of its reply"):
            await post(client, server.url)
        assert len(server.connections) == 1


@on_each_loop
async def test_a_new_connection_that_is_closed_is_not_opened_again(client: Http1Client) -> None:
    async with scripted(sends(then="reset"), sends(then="close")) as server:
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="without a reply"):
                await post(client, server.url)
        assert len(server.connections) == 2


@pytest.mark.parametrize("then", ["close", "reset"])
@pytest.mark.parametrize(
    "head", [OK + b"content-length: 11\r\n\r\n", OK + b"transfer-encoding: chunked\r\n\r\n5\r\n"]
)
@on_each_loop
async def test_a_reply_that_is_cut(client: Http1Client, head: bytes, then: str) -> None:
    cut = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(head + b"hello")
        await cut.wait()
        if then == "reset":
            connection.reset()

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
            cut.set()
            with pytest.raises(ConnectionLost, match="in the middle of its reply"):
                await reply.piece()


@on_each_loop
async def test_cancelling_closes_the_connection(client: Http1Client) -> None:
    async with scripted(sends(), sends(OK + b"content-length: 11\r\n\r\nhello")) as server:
        before_head = asyncio.create_task(post(client, server.url))
        await eventually(lambda: server.connections and server.connections[0].requests)
        before_head.cancel()
        await server.connections[0].closed.wait()
        within_body = asyncio.create_task(post(client, server.url))
        await eventually(lambda: client._open)
        await eventually(lambda: any(one._reply and one._reply.status for one in client._open))
        within_body.cancel()
        await server.connections[1].closed.wait()
        results = await asyncio.gather(before_head, within_body, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2


@on_each_loop
async def test_a_timeout_of_a_slow_server_closes_the_connection(client: Http1Client) -> None:
    async with scripted(sends()) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await post(client, server.url)
        await server.connections[0].closed.wait()


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", OK + b"content-length: 11\r\n\r\nhello"])
@on_each_loop
async def test_a_reply_that_stops(client: Http1Client, sent: bytes) -> None:
    async with scripted(sends(sent) if sent else sends()) as server:
        origin, _, headers = parse_url(server.url)
        request = b"GET / HTTP/1.1\r\n%b\r\n" % headers
        with pytest.raises(ReadTimeout, match="nothing was received for"):
            await (await client.send(origin, request, read_s=0.05)).read()
        await server.connections[0].closed.wait()


@on_each_loop
async def test_each_part_of_a_reply_has_the_time_to_arrive(client: Http1Client) -> None:
    async def script(connection: Scripted) -> None:
        await connection.request()
        for byte in in_bytes(OK[:10]):
            await connection.send(byte)
            await asyncio.sleep(0.03)
        await connection.send(LENGTH[10:])

    async with scripted(script) as server:
        origin, _, headers = parse_url(server.url)
        with await client.send(origin, b"GET / HTTP/1.1\r\n%b\r\n" % headers, read_s=0.2) as reply:
            assert await reply.read() == b"hello world"


@on_each_loop
async def test_a_reply_that_a_late_event_loop_reads_is_in_time(server_thread: str) -> None:
    client = Http1Client(connect_s=5.0, keepalive_s=3.0)
    origin, _, headers = parse_url(server_thread)
    request = b"GET / HTTP/1.1\r\n%b\r\n" % headers
    (await client.send(origin, request)).release()
    call = asyncio.create_task(client.send(origin, request, read_s=0.05))
    await asyncio.sleep(0)
    block(0.15)  # the reply arrives meanwhile
    assert await (await call).read() == b"ok"
    await client.close()


@on_each_loop
async def test_a_reply_that_is_left_closes_the_connection(client: Http1Client) -> None:
    async with scripted(sends(OK + b"content-length: 11\r\n\r\nhello")) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
        await server.connections[0].closed.wait()


@on_each_loop
async def test_a_released_reply_keeps_the_connection_when_its_rest_arrives(client: Http1Client) -> None:
    rest = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(OK + b"content-length: 11\r\n\r\nhello")
        await rest.wait()
        await connection.send(b" world")
        await connection.request()
        await connection.reply()

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
            reply.release()
        assert not idle_connections(client)
        rest.set()
        await eventually(lambda: idle_connections(client))
        assert await post(client, server.url) == b"ok"
        assert len(server.connections) == 1


@on_each_loop
async def test_a_released_reply_whose_rest_does_not_arrive(
    client: Http1Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_connection, "_REST_S", 0.01)
    async with scripted(sends(OK + b"content-length: 11\r\n\r\nhello")) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
            reply.release()
        await server.connections[0].closed.wait()


@on_each_loop
async def test_a_slow_reader_makes_the_server_wait(client: Http1Client) -> None:
    size = 24 * 2**20
    sent = 0

    async def script(connection: Scripted) -> None:
        nonlocal sent
        await connection.request()
        await connection.send(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            await connection.send(b"x" * 2**16)
            sent += 2**16

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            await eventually(lambda: reply._connection._paused)
            buffered = reply._size
            assert buffered < 2 * 2**20
            received = 0
            while piece := await reply.piece():
                received += len(piece)
            assert received == size
        with await begun(client, server.url) as reply:
            assert await reply.read() == b"ok"


@on_each_loop
async def test_a_reply_read_as_a_whole_is_not_paused(client: Http1Client) -> None:
    size = 8 * 2**20
    async with scripted(sends(OK + b"content-length: %d\r\n\r\n" % size, b"x" * size)) as server:
        reply = await begun(client, server.url)
        await eventually(lambda: reply._connection._paused)
        assert len(await reply.read()) == size


@on_each_loop
async def test_limits_of_the_head_and_the_body(client: Http1Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_connection, "MAX_BODY", 10)
    long = b"x-a: " + b"a" * 2**16
    async with scripted(sends(OK, long, long), sends(LENGTH), sends(CHUNKED)) as server:
        with pytest.raises(InvalidReply, match="headers of more than 65536 bytes"):
            await post(client, server.url)
        for _ in range(2):
            with pytest.raises(InvalidReply, match="body is larger than 10 bytes"):
                await post(client, server.url)
        for connection in server.connections:
            await connection.closed.wait()


@on_each_loop
async def test_a_long_stream_is_not_limited(client: Http1Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_connection, "MAX_BODY", 10)
    more = asyncio.Semaphore(0)

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(OK + b"content-length: 24\r\n\r\n")
        for _ in range(3):
            await connection.send(b"12345678")
            await more.acquire()

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            while piece := await reply.piece():
                assert piece == b"12345678"
                more.release()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        OK + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"content-length: -1\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
@on_each_loop
async def test_a_reply_that_is_not_http(client: Http1Client, answer: bytes) -> None:
    async with scripted(sends(answer)) as server:
        with pytest.raises(InvalidReply, match="invalid HTTP reply"):
            await post(client, server.url)
        await server.connections[0].closed.wait()


@on_each_loop
async def test_a_server_that_does_not_listen(client: Http1Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectFailed, match=f"cannot connect to http://127.0.0.1:{port}: ") as raised:
        await post(client, f"http://127.0.0.1:{port}")
    assert raised.value.errno == errno.ECONNREFUSED


@on_each_loop
async def test_a_host_name_that_cannot_be_resolved(client: Http1Client) -> None:
    with pytest.raises(ConnectFailed, match=r"cannot connect to http://nowhere\.invalid:80"):
        await post(client, "http://nowhere.invalid")
    assert not client._names


async def no_tls(connection: Scripted) -> None:
    await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@on_each_loop
async def test_a_server_without_tls(client: Http1Client) -> None:
    async with scripted(no_tls) as server:
        with pytest.raises(ConnectFailed, match=r"cannot connect to https://127\.0\.0\.1"):
            await post(client, server.url.replace("http", "https"))


@on_each_loop
async def test_calls_to_one_host_name_share_a_lookup(
    client: Http1Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = 0
    found = asyncio.Event()

    real = socket.getaddrinfo

    async def lookup(host: str, port: int) -> Any:
        nonlocal lookups
        lookups += 1
        await found.wait()
        return real("127.0.0.1", port, type=socket.SOCK_STREAM)

    monkeypatch.setattr(http1_client, "_lookup", lookup)
    async with scripted() as server:
        url = server.url.replace("127.0.0.1", "engine.example")
        calls = [asyncio.create_task(post(client, url)) for _ in range(5)]
        await eventually(lambda: lookups)
        calls[0].cancel()  # the others go on with the lookup that it began
        found.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert (results[1:], lookups) == ([b"ok"] * 4, 1)
        assert isinstance(results[0], asyncio.CancelledError)


@on_each_loop
async def test_idle_connections_are_closed_in_time() -> None:
    client = Http1Client(connect_s=5.0, keepalive_s=0.02)
    async with scripted() as server:
        for _ in range(2):
            await asyncio.gather(*(post(client, server.url) for _ in range(2)))
            for connection in server.connections:
                await connection.closed.wait()
        assert (len(server.connections), client._idle, client._open) == (4, {}, set())
    await client.close()


@on_each_loop
async def test_an_expired_connection_is_not_used(client: Http1Client) -> None:
    async with scripted() as server:
        await post(client, server.url)
        idle_connections(client)[0].idle_since -= 3.1
        await post(client, server.url)
        assert len(server.connections) == 2


@on_each_loop
async def test_closing_the_client_fails_its_calls() -> None:
    client = Http1Client(connect_s=5.0, keepalive_s=3.0)
    async with scripted(sends()) as server:
        call = asyncio.create_task(post(client, server.url))
        await eventually(lambda: server.connections and server.connections[0].requests)
        await client.close()
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await call
        await server.connections[0].closed.wait()


@on_each_loop
async def test_connecting_in_a_blocked_event_loop_does_not_time_out(server_thread: str) -> None:
    client = Http1Client(connect_s=0.1, keepalive_s=3.0)
    call = asyncio.create_task(post(client, server_thread))
    await asyncio.sleep(0)  # the connection is being established
    block(0.3)  # the fault that is tested
    assert await call == b"ok"
    await client.close()


@pytest.fixture
def server_thread() -> Any:
    """A server in a thread of its own, whose event loop is not blocked."""
    ready, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def main() -> None:
        async with scripted() as server:
            urls.append(server.url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    ready.wait()
    yield urls[0]
    stop.set()
    thread.join()


@on_each_loop
async def test_a_connection_that_is_not_established_times_out() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())  # so that there is no room for another one
        client = Http1Client(connect_s=0.1, keepalive_s=3.0)
        with pytest.raises(ConnectTimeout, match="took longer than"):
            await post(client, f"http://127.0.0.1:{full.getsockname()[1]}")
        await client.close()


@pytest.mark.parametrize(
    ("url", "origin", "path", "headers"),
    [
        ("http://h", Origin("h", 80, False), "/", b"host: h\r\n"),
        ("https://h/v1?a=b", Origin("h", 443, True), "/v1?a=b", b"host: h\r\n"),
        ("http://h/a b?c=ü%20\x01", Origin("h", 80, False), "/a%20b?c=%C3%BC%20%01", b"host: h\r\n"),
        ("http://h:81/a/b", Origin("h", 81, False), "/a/b", b"host: h:81\r\n"),
        ("http://[::1]:81", Origin("::1", 81, False), "/", b"host: [::1]:81\r\n"),
        (
            "http://bücher.example",
            Origin("xn--bcher-kva.example", 80, False),
            "/",
            b"host: xn--bcher-kva.example\r\n",
        ),
        (
            "http://me:p%40ss@h",
            Origin("h", 80, False),
            "/",
            b"host: h\r\nauthorization: Basic bWU6cEBzcw==\r\n",
        ),
    ],
)
def test_parts_of_a_url(url: str, origin: Origin, path: str, headers: bytes) -> None:
    assert parse_url(url) == (origin, path, headers)


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://a b/"])
def test_a_url_that_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        parse_url(url)


def test_names_of_origins() -> None:
    assert [str(Origin("h", 80, False)), str(Origin("::1", 1, True))] == ["http://h:80", "https://[::1]:1"]
