"""`tidegate gateway`: the gateway by itself."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.verbs import Verbs, add_address, log_to_stderr
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.gateway.rewards import Rewarder


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser("gateway", help="serve the gateway", description="Serve the gateway.")
    verb.add_argument("--model", type=Path, required=True, help="a directory with the model's tokenizer")
    verb.add_argument("--engine", action="append", default=[], metavar="URL", help="may be repeated")
    verb.add_argument("--env", help="the environment whose rewards are given")
    verb.add_argument("--env-options", type=json.loads, default={}, metavar="JSON")
    verb.add_argument("--tool-parser", choices=["hermes", "none"], default="hermes")
    verb.add_argument(
        "--limit", action="append", default=[], metavar="NAME=N",
        help="what each session may use, unless it is opened with its own: turns, tokens (sampled), "
        "seconds, calls (at once); may be repeated",
    )  # fmt: skip
    verb.add_argument(
        "--journal", type=Path, metavar="DIR", help="keep sessions and groups there: they survive a restart"
    )
    verb.epilog = "TIDEGATE_ADMIN_KEY in the environment guards the control plane; needed beyond loopback."
    add_address(verb, 8000)
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.envs.base import load_environment
    from tidegate.gateway.client import ADMIN_KEY
    from tidegate.gateway.limits import Limits
    from tidegate.gateway.server import GatewayOptions, serve
    from tidegate.serve import Listen

    key = os.environ.get(ADMIN_KEY)
    if arguments.host not in ("127.0.0.1", "localhost", "::1") and key is None:
        raise ConfigError(f"--host {arguments.host} is reachable by others: set {ADMIN_KEY}")
    log_to_stderr()
    rewarders: Mapping[str, Rewarder] = {}
    if arguments.env is not None:
        rewarders = load_environment(arguments.env, arguments.env_options).rewarders()
    options = GatewayOptions(
        model=arguments.model,
        engine_urls=arguments.engine,
        admin_key=key,
        tool_parser=arguments.tool_parser,
        rewarders=rewarders,
        limits=Limits(**dict(map(_limit, arguments.limit))),
        journal=arguments.journal,
    )
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned))
    return 0


def _limit(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    names = ("turns", "tokens", "seconds", "calls")
    if name not in names or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--limit {text}: give NAME=N, with a name of {', '.join(names)} and N at least 1")
    return name, int(number)
