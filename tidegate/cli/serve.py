"""`tidegate serve`: serves a model to clients and trains it on their conversations until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, takes_settings
from tidegate.errors import STOPPED, ConfigError
from tidegate.service.process_secrets import shield_process

if TYPE_CHECKING:
    from tidegate.service.directory_lock import DirectoryLock
    from tidegate.trainer.processes.standing import StandingService


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model to clients and train it on their conversations",
        usage="tidegate serve CONFIG.toml [--fresh] [--section.key value ...]",
        description="Start engines, a gateway and a trainer that learns from clients with a project key, and "
        "restart each of them when it exits, until the command is stopped. A run of this name is continued.",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="rename an existing run of this name and start a new one"
    )
    takes_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.config import load_settings
    from tidegate.launch import check, check_model
    from tidegate.service.directory_lock import DirectoryLock
    from tidegate.settings.reading import split_file
    from tidegate.trainer.preflight import check_nccl, check_writable, set_nccl_memory
    from tidegate.trainer.processes.standing import StandingService

    file, overrides = split_file(rest)
    if file is None and not overrides:
        raise ConfigError("no settings: name a file, for example tidegate serve examples/online/config.toml")
    settings = load_settings(file, overrides)
    shield_process()
    set_nccl_memory()
    service = StandingService(settings, lambda text: print(text, flush=True))
    check(settings)
    check_writable(settings.run_dir)
    check_nccl(settings)  # its trainer knows the engines by their addresses only
    check_model(settings, engines=True)
    with DirectoryLock(settings.run_dir, "tidegate serve") as lock:
        if arguments.fresh:
            lock.set_aside()
        return asyncio.run(_serve(service, lock))


async def _serve(service: StandingService, lock: DirectoryLock) -> int:
    from tidegate.launch import stop_on_signals

    def stop() -> None:
        if service.stop.is_set():
            os._exit(STOPPED)  # the processes exit when their stdin closes
        service.stop.set()

    stop_on_signals(stop)
    await service.run(lock)
    return 0
