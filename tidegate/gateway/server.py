"""The gateway as a process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError, StartError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.sharding.frontend import ShardRouter
from tidegate.gateway.sharding.shard import Shard
from tidegate.service.serve import Listen, bind, run_app

__all__ = ["GatewayOptions", "serve", "serve_front"]


def serve(options: GatewayOptions, listen: Listen) -> None:
    """Serve until told to stop; raises StartError or ConfigError where it cannot begin."""
    _check_key(listen, options.admin_key)
    gateway = Gateway(options)
    _collect_less()
    # A thread that encodes a long text gives the event loop its turn after so many seconds; by default 5 ms.
    sys.setswitchinterval(0.0005)
    run_app(create_app(gateway), bind(listen), listen)


def serve_front(
    shards: int, arguments: Callable[[int], Sequence[str]], listen: Listen, secrets: Mapping[str, Any]
) -> None:
    """Serve a front and own its shards, `tidegate gateway` processes that get `arguments(index)` and
    `secrets`, the admin key among them.

    Raises StartError where a shard does not start, or dies again and again.
    """
    admin_key = secrets.get("admin_key")
    _check_key(listen, admin_key)
    sock = bind(listen)
    failed: list[str] = []

    def end(why: str) -> None:
        failed.append(why)
        os.kill(os.getpid(), signal.SIGINT)

    # When all is done uvicorn raises once more what ended it, which must not skip what comes after it here.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tidegate-front-") as directory:
        fleet = [
            Shard(index, arguments(index), Path(directory), secrets, listen.host) for index in range(shards)
        ]
        run_app(ShardRouter(fleet, admin_key, end).create_app(), sock, listen)
    if failed:
        raise StartError(f"the gateway's front ended: {failed[0]}")


def _check_key(listen: Listen, admin_key: str | None) -> None:
    if listen.host not in ("127.0.0.1", "localhost", "::1") and admin_key is None:
        raise ConfigError(
            f"the gateway would listen on {listen.host} for anyone: set an admin key, or listen on loopback"
        )


def _collect_less() -> None:
    """Spare the garbage collector what lives as long as the process: a hundred thousand objects.

    Turns make many objects and few cycles. By default it would look for them several times a turn, which
    took a sixth of a turn's whole time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
