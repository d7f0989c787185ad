"""`tidegate engine`: serves a model by SGLang's HTTP protocol."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from tidegate.cli.commands import (
    Subparsers,
    add_engine_options,
    engine_key_of,
    log_to_stderr,
    takes_settings,
)
from tidegate.errors import ConfigError, GatewayError
from tidegate.service.process_secrets import shield_process

log = logging.getLogger("tidegate.engine")
JOIN_S = 5.0
"""Timeout of a call to the gateway, which waits two seconds for the engine's first probe."""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "engine",
        help="serve a model",
        usage="tidegate engine --model.path DIR [options] [--section.key value ...]",
        description="Serve a model with SGLang's HTTP protocol.",
    )
    parser.add_argument(
        "--join", metavar="GATEWAY_URL",
        help="add the engine to this gateway once it serves, and remove it on exit; the environment variable "
        "TIDEGATE_ADMIN_KEY holds the gateway's admin key",
    )  # fmt: skip
    add_engine_options(parser)
    takes_settings(parser, "tidegate.settings.servers:EngineCommand")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.engine.options import EngineOptions
    from tidegate.engine.server.server import serve
    from tidegate.service.serve import Listen
    from tidegate.settings.reading import load
    from tidegate.settings.servers import EngineCommand

    settings, key = load(EngineCommand, None, rest), engine_key_of(arguments)
    log_to_stderr()
    engine = settings.engine.model_dump() | {"dtype": settings.engine.weights_dtype}
    options = EngineOptions(settings.model.path, weight_version=arguments.weight_version, **engine)
    listed = None if arguments.join is None else _joining(arguments.join, arguments.host)
    listen = Listen(arguments.host, arguments.port, arguments.announce, arguments.owned, listed=listed)
    serve(options, listen, key)
    return 0


def _joining(gateway: str, host: str) -> Callable[[str], AbstractAsyncContextManager[None]]:
    """Adds an engine's URL to the gateway, and removes it."""
    from tidegate.gateway.client import ADMIN_KEY, GatewayClient
    from tidegate.service.api_key import key_from_environment

    shield_process()
    if host in ("0.0.0.0", "::"):
        raise ConfigError(f"--join with --host {host}: give --host an address that the gateway can call")

    key = key_from_environment(ADMIN_KEY)

    @contextlib.asynccontextmanager
    async def joined(url: str) -> AsyncIterator[None]:
        async with GatewayClient(gateway, key, call_s=JOIN_S) as client:
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
