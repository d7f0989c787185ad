"""`tidegate worker`: runs an agent on attempts that it takes from a gateway.

A run starts its own agents' processes as this command, too: `--owned`, with what is secret passed through a
socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tidegate.cli.commands import Subparsers, add_parent
from tidegate.errors import ConfigError
from tidegate.service.process_secrets import receive_secrets, shield_process


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "worker",
        help="run an agent for a training run elsewhere",
        description="Take attempts from the gateway of a run with agent.source = \"remote\", and run an "
        "agent on them until the command is stopped.",
        epilog="The environment variable TIDEGATE_WORKER_KEY sets the key, if there is no --key-file.",
    )  # fmt: skip
    parser.add_argument("--gateway", required=True, metavar="URL", help="address of the run's gateway")
    parser.add_argument("--agent", required=True, metavar="FILE.py:NAME", help="agent, as for agent.use")
    parser.add_argument("--options", default="{}", metavar="JSON", help="options of the agent")
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="attempts that run at the same time"
    )
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the worker key")
    parser.add_argument("--secrets-fd", type=int, help=argparse.SUPPRESS)
    add_parent(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.agents.attempt_runner import serve
    from tidegate.agents.base import load_agent

    shield_process()
    secrets = _secrets(arguments)
    gateway = _address(arguments.gateway)
    if arguments.concurrency < 1:
        raise ConfigError(f"--concurrency {arguments.concurrency} must be at least 1")
    name = secrets.get("name")
    try:
        agent = load_agent(arguments.agent, secrets["options"])
    except ConfigError as error:
        _announce(arguments.announce, {"error": str(error)})
        raise
    _announce(arguments.announce, {"url": name})
    asyncio.run(serve(gateway, secrets["key"], agent, arguments.concurrency, name, owned=arguments.owned))
    # Threads of agents that never return must not keep the process running.
    sys.stderr.flush()
    os._exit(0)


def _announce(file: Path | None, what: dict[str, str | None]) -> None:
    """Tells the owner that the agent is loaded, or why it is not."""
    from tidegate.service.serve import write_atomically

    if file is not None:
        write_atomically(file, json.dumps(what))


def _secrets(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the worker key and the agent's options; of an owned worker its name, too."""
    if arguments.secrets_fd is not None:
        return receive_secrets(arguments.secrets_fd)
    return {"key": _key(arguments.key_file), "options": _options(arguments.options)}


def _address(url: str) -> str:
    from tidegate.settings.sections import http_url

    try:
        return http_url(url)
    except ValueError as error:
        raise ConfigError(f"--gateway {url}: {error}") from None


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--options {text} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--options {text} is not a JSON object, such as " + '{"max_turns": 4}')
    return options


def _key(file: Path | None) -> str:
    from tidegate.gateway.client import WORKER_KEY
    from tidegate.service.api_key import key_from_environment

    key = key_from_environment(WORKER_KEY)
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--key-file {file} cannot be read: {error.strerror}") from None
    if not key:
        raise ConfigError(f"no worker key: give --key-file RUN/worker.key, or set {WORKER_KEY}")
    return key
