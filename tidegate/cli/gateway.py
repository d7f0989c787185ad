"""`tidegate gateway`: the gateway by itself."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.verbs import Verbs, add_address, log_to_stderr
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.gateway.options import GatewayOptions
    from tidegate.gateway.rewards import Rewarder


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser("gateway", help="serve the gateway", description="Serve the gateway.")
    verb.add_argument("--model", type=Path, required=True, help="a directory with the model's tokenizer")
    verb.add_argument("--engine", action="append", default=[], metavar="URL", help="may be repeated")
    verb.add_argument("--env", help="the environment whose rewards are given")
    verb.add_argument("--env-options", type=json.loads, default={}, metavar="JSON")
    verb.add_argument("--tool-parser", default="auto", help="the form of the model's tool calls")
    verb.add_argument(
        "--limit", action="append", default=[], metavar="NAME=N",
        help="what each session may use, unless it is opened with its own: turns, tokens (sampled), "
        "seconds, calls (at once); may be repeated",
    )  # fmt: skip
    verb.add_argument(
        "--journal", type=Path, metavar="DIR", help="keep sessions and groups there: they survive a restart"
    )
    verb.add_argument(
        "--shards",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the sessions, behind one address",
    )
    verb.add_argument("--access-log", action="store_true", help="log one line a turn, as JSON")
    verb.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    verb.add_argument("--shard", type=_shard, default=(0, 1), help=argparse.SUPPRESS)
    verb.epilog = "TIDEGATE_ADMIN_KEY in the environment guards the control plane; needed beyond loopback."
    add_address(verb, 8000)
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.gateway.client import ADMIN_KEY
    from tidegate.gateway.server import serve, serve_front
    from tidegate.serve import Listen

    key = os.environ.get(ADMIN_KEY)
    if arguments.host not in ("127.0.0.1", "localhost", "::1") and key is None:
        raise ConfigError(f"--host {arguments.host} is reachable by others: set {ADMIN_KEY}")
    log_to_stderr()
    logging.getLogger("tidegate.gateway.access").setLevel("INFO" if arguments.access_log else "WARNING")
    limits = dict(map(_limit, arguments.limit))
    listen = Listen(arguments.host, arguments.port, arguments.announce, arguments.owned, arguments.fd)
    if arguments.shards > 1:
        serve_front(arguments.shards, _shards_arguments(arguments), listen, key)
    else:
        serve(_options(arguments, limits, key), listen)
    return 0


def _options(arguments: argparse.Namespace, limits: dict[str, int], key: str | None) -> GatewayOptions:
    from tidegate.envs.base import load_environment
    from tidegate.gateway.limits import Limits
    from tidegate.gateway.options import GatewayOptions
    from tidegate.gateway.pool import PoolOptions
    from tidegate.gateway.shards import journal_of, mark_of

    rewarders: Mapping[str, Rewarder] = {}
    if arguments.env is not None:
        rewarders = load_environment(arguments.env, arguments.env_options).rewarders()
    index, shards = arguments.shard
    journal = arguments.journal
    if journal is not None and shards == 1:  # a shard is given its own part
        journal = journal_of(journal, 0, 1)
    return GatewayOptions(
        model=arguments.model,
        engine_urls=arguments.engine,
        admin_key=key,
        tool_parser=arguments.tool_parser,
        rewarders=rewarders,
        limits=Limits(**limits),
        journal=journal,
        pool=PoolOptions(shards=shards),
        mark=mark_of(index) if shards > 1 else "",
    )


def _shards_arguments(arguments: argparse.Namespace) -> Callable[[int], list[str]]:
    """Each shard's command line: the front's own, but for its address, and with a part of the journal."""
    from tidegate.gateway.shards import journal_of

    shared = [
        "--model",
        str(arguments.model),
        "--host",
        arguments.host,
        "--tool-parser",
        arguments.tool_parser,
    ]
    for name, values in (("--engine", arguments.engine), ("--limit", arguments.limit)):
        shared += [part for value in values for part in (name, value)]
    if arguments.env is not None:
        shared += ["--env", arguments.env, "--env-options", json.dumps(arguments.env_options)]

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


def _limit(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    names = ("turns", "tokens", "seconds", "calls")
    if name not in names or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--limit {text}: give NAME=N, with a name of {', '.join(names)} and N at least 1")
    return name, int(number)
