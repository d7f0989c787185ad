"""Runs one of Tidegate's servers: binds, announces its address, serves, and exits with its parent.

A parent starts a server with `--announce FILE` and keeps the write end of its stdin open. The server binds
(port 0 takes a free one), writes `{"url", "pid"}` to FILE once it accepts calls, and exits when its stdin
closes, so that it exits if the parent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from tidegate.errors import StartError, TidegateError
from tidegate.service.address import reachable_address
from tidegate.service.api_key import NeedsKey
from tidegate.service.bounds import BoundedProtocol
from tidegate.service.local_only import LocalOnly
from tidegate.service.parent_death import end_with_parent

log = logging.getLogger("tidegate.service.serve")


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a server listens, and how it announces its address."""

    host: str = "127.0.0.1"
    port: int = 0
    announce: Path | None = None
    owned: bool = False
    """Exit when stdin closes."""
    fd: int | None = None
    """A bound socket inherited from the owner, instead of host and port."""
    listed: Callable[[str], AbstractAsyncContextManager[None]] | None = None
    """Registration elsewhere: entered with the URL once the server accepts calls, left before it exits."""

    @property
    def on_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")


def bind(listen: Listen, setting: str = "--port") -> socket.socket:
    """Return a bound socket; raises StartError, which names the setting of the port, if the port is taken."""
    if listen.fd is not None:
        return socket.socket(fileno=listen.fd)
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((listen.host, listen.port))
    except (OSError, OverflowError) as error:
        sock.close()
        why = error.strerror if isinstance(error, OSError) else error
        raise StartError(
            f"cannot listen on {listen.host}:{listen.port}: {why}; "
            f"choose another port ({setting}), or port 0 for a free one"
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = reachable_address(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_app(
    app: Callable[..., Any],
    sock: socket.socket,
    listen: Listen,
    *,
    keyless: bool = False,
    key: str | None = None,
) -> None:
    """Serve an ASGI app on a bound socket until SIGTERM, SIGINT or (if owned) the parent's exit.

    Args:
        app: The ASGI app.
        sock: The bound socket.
        listen: Where it listens, and how it announces its address.
        keyless: Whether calls need no key; then those that web pages can send are refused.
        key: Key that calls need, but those of health; None: the app checks its calls itself, if any.
    """
    if key is not None:
        app = NeedsKey(app, key)
    if keyless:
        app = LocalOnly(app, on_loopback=listen.on_loopback)
    # Keep idle connections longer than clients do, so that the server never closes one as a client uses it.
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
    )
    server = _Announcing(config, listen, url_of(sock))
    if listen.owned:
        end_with_parent(lambda: setattr(server, "should_exit", True))
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
    ):
        runner.run(server.serve(sockets=[sock]))


class _Announcing(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listen: Listen, url: str) -> None:
        super().__init__(config)
        self._listen = listen
        self._url = url
        self._listed = contextlib.AsyncExitStack()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        if self._listen.announce is not None:
            write_atomically(self._listen.announce, json.dumps({"url": self._url, "pid": os.getpid()}))
        if not self._listen.owned:
            log.info("serving at %s (Ctrl-C ends it)", self._url)
        if self._listen.listed is not None:
            try:
                await self._listed.enter_async_context(self._listen.listed(self._url))
            except TidegateError:
                await super().shutdown(sockets)
                raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._listed.aclose()
        await super().shutdown(sockets)


def write_atomically(path: Path, text: str) -> None:
    """Write a file such that readers see either all of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
