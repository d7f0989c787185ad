"""The head of a response is written with its body, and alone if the body comes later."""

from __future__ import annotations

import asyncio

from tidegate.service.http_protocol import _JoiningTransport

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
