"""`tidegate gateway`: starts a gateway without a run."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.cli.commands import Subparsers, add_address, log_to_stderr
from tidegate.errors import ConfigError
from tidegate.service.process_secrets import receive_secrets, shield_process

if TYPE_CHECKING:
    from tidegate.gateway.groups.rewards import Rewarder
    from tidegate.gateway.options import GatewayOptions


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("gateway", help="serve the gateway", description="Serve the gateway.")
    parser.add_argument("--model", type=Path, required=True, help="directory with the model's tokenizer")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="URL", help="engine URL; may be repeated"
    )
    parser.add_argument("--env", help="environment that computes the rewards")
    parser.add_argument("--env-options", type=json.loads, default={}, metavar="JSON", help="options of --env")
    parser.add_argument(
        "--reward-timeout", type=_seconds, default=60.0, metavar="S",
        help="timeout in seconds for the rewards of one episode",
    )  # fmt: skip
    parser.add_argument("--tool-parser", default="auto", help="tool-call format of the model")
    parser.add_argument(
        "--structured-output", choices=["text", "grammar"], default="text",
        help="how replies to requests with a JSON schema are sampled in training sessions",
    )  # fmt: skip
    parser.add_argument(
        "--untrained-model", action="append", default=[], metavar="NAME",
        help="model name whose calls are not trained on; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--limit", action="append", default=[], metavar="NAME=N",
        help="default limit of a session: turns, tokens (sampled), seconds or calls (concurrent); "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--journal", type=Path, metavar="DIR", help="journal directory for recovery after a restart"
    )
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        metavar="N",
        help="number of gateway processes behind one address",
    )
    parser.add_argument(
        "--public-url", metavar="URL",
        help="URL by which agents reach the gateway behind a proxy or NAT, for example https://host:8000",
    )  # fmt: skip
    parser.add_argument("--access-log", action="store_true", help="log one line of JSON per turn")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--secrets-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=_shard, default=(0, 1), help=argparse.SUPPRESS)
    parser.epilog = (
        "The environment variable TIDEGATE_ADMIN_KEY sets the key of the control plane, required unless "
        "--host is loopback."
    )
    add_address(parser, 8000)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.gateway.client import ADMIN_KEY
    from tidegate.gateway.server import serve, serve_front
    from tidegate.service.serve import Listen

    shield_process()
    secrets = _secrets(arguments, os.environ.pop(ADMIN_KEY, None))
    key = secrets.get("admin_key")
    if arguments.host not in ("127.0.0.1", "localhost", "::1") and key is None:
        raise ConfigError(f"--host {arguments.host} accepts connections from other machines: set {ADMIN_KEY}")
    log_to_stderr()
    logging.getLogger("tidegate.gateway.access").setLevel("INFO" if arguments.access_log else "WARNING")
    limits = dict(map(_limit, arguments.limit))
    listen = Listen(arguments.host, arguments.port, arguments.announce, arguments.owned, arguments.fd)
    if arguments.shards > 1:
        serve_front(arguments.shards, _shards_arguments(arguments), listen, secrets)
    else:
        serve(_options(arguments, limits, secrets), listen)
    return 0


def _secrets(arguments: argparse.Namespace, key: str | None) -> dict[str, Any]:
    """Returns the secrets passed by the parent process, else those of the command line and environment."""
    if arguments.secrets_fd is not None:
        return {"env_options": {}, **receive_secrets(arguments.secrets_fd)}
    return {"env_options": arguments.env_options} | ({} if key is None else {"admin_key": key})


def _options(
    arguments: argparse.Namespace, limits: dict[str, int], secrets: dict[str, Any]
) -> GatewayOptions:
    from tidegate.envs.base import check_reward_timeout, load_environment
    from tidegate.gateway.engines.engine import PoolOptions
    from tidegate.gateway.options import GatewayOptions
    from tidegate.gateway.sessions.limits import SessionLimits
    from tidegate.gateway.sharding.shard import id_prefix, journal_of

    rewarders: Mapping[str, Rewarder] = {}
    if arguments.env is not None:
        environment = load_environment(arguments.env, secrets["env_options"])
        check_reward_timeout(environment, arguments.reward_timeout)
        rewarders = environment.rewarders()
    index, shards = arguments.shard
    journal = arguments.journal
    if journal is not None and shards == 1:  # a shard is given its own part
        journal = journal_of(journal, 0, 1)
    return GatewayOptions(
        model=arguments.model,
        public_url=arguments.public_url and arguments.public_url.rstrip("/"),
        engine_urls=arguments.engine,
        admin_key=secrets.get("admin_key"),
        tool_parser=arguments.tool_parser,
        structured_output=arguments.structured_output,
        untrained_models=arguments.untrained_model,
        rewarders=rewarders,
        reward_timeout_s=arguments.reward_timeout,
        limits=SessionLimits(**limits),
        journal=journal,
        pool=PoolOptions(shards=shards),
        id_prefix=id_prefix(index) if shards > 1 else "",
    )


def _shards_arguments(arguments: argparse.Namespace) -> Callable[[int], list[str]]:
    """Returns a function that makes a shard's command line: the frontend's, with its part of the journal."""
    from tidegate.gateway.sharding.shard import journal_of

    shared = [
        "--model",
        str(arguments.model),
        "--host",
        arguments.host,
        "--tool-parser",
        arguments.tool_parser,
        "--reward-timeout",
        str(arguments.reward_timeout),
        "--structured-output",
        arguments.structured_output,
    ]
    repeated = {
        "--engine": arguments.engine,
        "--limit": arguments.limit,
        "--untrained-model": arguments.untrained_model,
    }
    for name, values in repeated.items():
        shared += [part for value in values for part in (name, value)]
    if arguments.env is not None:
        shared += ["--env", arguments.env]
    if arguments.public_url is not None:
        shared += ["--public-url", arguments.public_url]
    if arguments.access_log:
        shared.append("--access-log")

    def of(index: int) -> list[str]:
        own = ["--shard", f"{index}/{arguments.shards}"]
        if arguments.journal is not None:
            own += ["--journal", str(journal_of(arguments.journal, index, arguments.shards))]
        return shared + own

    return of


def _shard(text: str) -> tuple[int, int]:
    index, _, shards = text.partition("/")
    return int(index), int(shards)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def _limit(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    names = ("turns", "tokens", "seconds", "calls")
    if name not in names or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--limit {text}: give NAME=N, with a name of {', '.join(names)} and N at least 1")
    return name, int(number)
