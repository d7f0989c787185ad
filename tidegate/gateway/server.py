"""Runs a gateway, or several behind one address, as a process."""

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
from tidegate.gateway.sharding.router import ShardRouter
from tidegate.gateway.sharding.shard import Shard
from tidegate.service.heap import return_freed_memory
from tidegate.service.serve import Listen, bind, run_app

__all__ = ["GatewayOptions", "serve", "serve_front"]


def serve(options: GatewayOptions, listen: Listen) -> None:
    """Serves a gateway until a signal stops it. Raises StartError or ConfigError if it cannot start."""
    _check_admin_key(listen, options.admin_key)
    return_freed_memory()
    gateway = Gateway(options)
    _reduce_garbage_collection()
    # A thread that encodes a long text yields to the event loop after 0.5 ms instead of 5 ms.
    sys.setswitchinterval(0.0005)
    app = create_app(gateway)
    run_app(app, bind(listen, "gateway.port"), listen, keyless=options.admin_key is None)


def serve_front(
    shards: int, arguments: Callable[[int], Sequence[str]], listen: Listen, secrets: Mapping[str, Any]
) -> None:
    """Serves a shard router and its shards, which are `tidegate gateway` processes.

    Args:
        shards: Number of shards.
        arguments: Returns the command-line arguments of a shard, by index.
        listen: Address to listen on.
        secrets: Secrets that are passed to the shards, including `admin_key`.

    Raises:
        StartError: A shard does not start or exits repeatedly.
    """
    admin_key = secrets.get("admin_key")
    _check_admin_key(listen, admin_key)
    sock = bind(listen, "gateway.port")
    failures: list[str] = []

    def stop(reason: str) -> None:
        failures.append(reason)
        os.kill(os.getpid(), signal.SIGINT)

    # On exit uvicorn raises the signal that stopped it again, which must not skip the clean-up below.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tidegate-router-") as directory:
        fleet = [
            Shard(index, arguments(index), Path(directory), secrets, listen.host) for index in range(shards)
        ]
        router = ShardRouter(fleet, admin_key, stop).create_app()
        run_app(router, sock, listen, keyless=admin_key is None)
    if failures:
        raise StartError(f"the gateway's shard router stopped: {failures[0]}")


def _check_admin_key(listen: Listen, admin_key: str | None) -> None:
    if not listen.on_loopback and admin_key is None:
        raise ConfigError(
            f"listening on {listen.host} without an admin key would give anyone access: set an admin key, or "
            "listen on loopback"
        )


def _reduce_garbage_collection() -> None:
    """Excludes the existing objects from garbage collection and collects less often.

    Turns create many objects but few cycles. The default thresholds cause several collections per turn, which
    took a sixth of a turn's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
