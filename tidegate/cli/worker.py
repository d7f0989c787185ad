"""`tidegate worker`: runs an agent on attempts that it takes from a gateway elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from tidegate.cli.commands import Subparsers
from tidegate.errors import ConfigError
from tidegate.service.process_secrets import shield_process


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "worker",
        help="run an agent for a training run elsewhere",
        description="Take attempts from the gateway of a run with agent.source = \"remote\", run an agent on "
        "them, and go on until it is stopped.",
        epilog="The environment variable TIDEGATE_WORKER_KEY sets the key, if there is no --key-file.",
    )  # fmt: skip
    parser.add_argument("--gateway", required=True, metavar="URL", help="address of the run's gateway")
    parser.add_argument("--agent", required=True, metavar="FILE.py:NAME", help="agent, as for agent.use")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="options of the agent")
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="attempts that run at the same time"
    )
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the worker key")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.agents.base import load_agent
    from tidegate.agents.remote_worker import serve

    shield_process()
    key = _key(arguments.key_file)
    if arguments.concurrency < 1:
        raise ConfigError(f"--concurrency {arguments.concurrency} must be at least 1")
    agent = load_agent(arguments.agent, arguments.options)
    asyncio.run(serve(arguments.gateway, key, agent, arguments.concurrency))
    # Threads of agents that never return must not keep the process running.
    sys.stderr.flush()
    os._exit(0)


def _key(file: Path | None) -> str:
    from tidegate.gateway.client import WORKER_KEY

    key = os.environ.pop(WORKER_KEY, None)
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--key-file {file} cannot be read: {error.strerror}") from None
    if not key:
        raise ConfigError(f"no worker key: give --key-file RUN/worker.key, or set {WORKER_KEY}")
    return key
