"""`tidegate engine`: serves a model by SGLang's HTTP protocol."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tidegate.cli.commands import Subparsers, add_address, log_to_stderr
from tidegate.errors import ConfigError, GatewayError
from tidegate.service.process_secrets import shield_process

log = logging.getLogger("tidegate.engine")
JOIN_S = 5.0
"""Timeout of a call to the gateway, which waits two seconds for the engine's first probe."""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "engine", help="serve a model", description="Serve a model with SGLang's HTTP protocol."
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory in Hugging Face format")
    parser.add_argument("--weight-version", type=int, default=0, help="version number of these weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-slots", type=int, default=64, help="maximum number of concurrent requests")
    parser.add_argument(
        "--max-context", type=int, default=1024, help="maximum prompt + output tokens of a request"
    )
    parser.add_argument(
        "--prefix-cache-mb",
        type=int,
        default=256,
        help="size of the prefix cache for follow-up turns; 0 disables it",
    )
    parser.add_argument(
        "--join", metavar="GATEWAY_URL",
        help="add the engine to this gateway once it serves, and remove it on exit; the environment variable "
        "TIDEGATE_ADMIN_KEY holds the gateway's admin key",
    )  # fmt: skip
    add_address(parser, 30000)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.engine.options import EngineOptions
    from tidegate.engine.server.server import serve
    from tidegate.service.serve import Listen

    log_to_stderr()
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_slots=arguments.max_slots,
        max_context=arguments.max_context,
        prefix_cache_mb=arguments.prefix_cache_mb,
        weight_version=arguments.weight_version,
    )
    listed = None if arguments.join is None else _joining(arguments.join, arguments.host)
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned, listed=listed))
    return 0


def _joining(gateway: str, host: str) -> Callable[[str], AbstractAsyncContextManager[None]]:
    """Adds an engine's URL to the gateway, and removes it."""
    from tidegate.gateway.client import ADMIN_KEY, GatewayClient

    shield_process()
    if host in ("0.0.0.0", "::"):
        raise ConfigError(f"--join with --host {host}: give --host an address that the gateway can call")

    @contextlib.asynccontextmanager
    async def joined(url: str) -> AsyncIterator[None]:
        async with GatewayClient(gateway, os.environ.get(ADMIN_KEY), call_s=JOIN_S) as client:
            await client.add_engine(url)
            log.info("%s joined %s", url, gateway)
            try:
                yield
            finally:
                try:
                    await client.remove_engine(url)
                except GatewayError as error:  # the gateway may have exited before
                    log.warning("%s could not leave: %s", url, error)

    return joined
