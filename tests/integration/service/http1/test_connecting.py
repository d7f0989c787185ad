"""Connections that cannot be established. On the event loops of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Any

import pytest

from tests.integration.service.http1.calls import (
    block,
    on_each_loop,
    post,
)
from tests.scripted_server import Scripted, scripted
from tests.waiting import eventually
from tidegate.service.http1 import client as http1_client
from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.errors import (
    ConnectFailed,
    ConnectTimeout,
)


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
async def test_connecting_in_a_blocked_event_loop_does_not_time_out(server_thread: str) -> None:
    client = Http1Client(connect_s=0.1, keepalive_s=3.0)
    call = asyncio.create_task(post(client, server_thread))
    await asyncio.sleep(0)  # the connection is being established
    block(0.3)  # the fault that is tested
    assert await call == b"ok"
    await client.close()


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
