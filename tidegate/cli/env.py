"""`tidegate env serve`: serves an environment to gateways."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tidegate.cli.commands import Subparsers, add_address, log_to_stderr, takes_settings
from tidegate.errors import ConfigError

PORT = 8010


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "env", help="serve an environment to gateways", description="Environments in processes of their own."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser(
        "serve",
        help="serve an environment",
        usage="tidegate env serve [ENVIRONMENT] [--host HOST] [--port PORT] [--section.key value ...]",
        description="Serve an environment: its rewards, the states of its episodes and its tools. "
        "ENVIRONMENT is the same as --env.use: a built-in name, or file.py:Class.",
        epilog="The environment variable TIDEGATE_ENV_KEY sets the key, needed unless the host is loopback.",
    )
    add_address(action, PORT)
    action.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    action.add_argument("--secrets-fd", type=int, help=argparse.SUPPRESS)
    takes_settings(action, "tidegate.settings.servers:EnvCommand")
    action.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.envs.base import check_name
    from tidegate.envs.service.pool import PoolSettings
    from tidegate.envs.service.server import serve
    from tidegate.service.api_key import ENV_KEY, key_from_environment
    from tidegate.service.process_secrets import receive_secrets, shield_process
    from tidegate.service.serve import Listen
    from tidegate.settings.judge import JudgeSettings
    from tidegate.settings.reading import load, split_words
    from tidegate.settings.servers import EnvCommand

    shield_process()
    words, overrides = split_words(rest)
    if len(words) > 1:
        raise ConfigError(f"expected one environment, not {' and '.join(words)}")
    env = load(EnvCommand, None, [*(f"--env.use={word}" for word in words), *overrides]).env
    if not arguments.owned:
        check_name(env.use)
    secrets: dict[str, Any] = {"key": key_from_environment(ENV_KEY), "options": env.options}
    judge = env.judge.resolved()
    if arguments.secrets_fd is not None:
        secrets = receive_secrets(arguments.secrets_fd)
        judge = JudgeSettings.model_validate(secrets.get("judge", {}))
    log_to_stderr()
    environment = {
        "use": env.use,
        "options": secrets["options"],
        "conversation_rewards": secrets.get("conversation_rewards", []),
        "reward_range": secrets.get("reward_range"),
    }
    cache = secrets.get("judge_cache")
    settings = PoolSettings(
        environment, env.workers, env.reward_timeout_s, env.call_timeout_s,
        None if judge.url is None else judge, None if cache is None else Path(cache),
    )  # fmt: skip
    listen = Listen(arguments.host, arguments.port, arguments.announce, arguments.owned, arguments.fd)
    serve(settings, secrets["key"], listen)
    return 0
