"""`tidegate gateway`: starts a gateway without a run."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.cli.commands import Subparsers, add_parent, log_to_stderr, takes_settings
from tidegate.errors import ConfigError
from tidegate.service.process_secrets import receive_secrets, shield_process

if TYPE_CHECKING:
    from tidegate.gateway.environments.base import EnvironmentService
    from tidegate.gateway.options import GatewayOptions
    from tidegate.settings.servers import GatewayCommand


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "gateway",
        help="serve the gateway",
        usage="tidegate gateway --model.path DIR [options] [--section.key value ...]",
        description="Start a gateway without a run, for clients, tests or runs with gateway.url.",
        epilog="The environment variable TIDEGATE_ADMIN_KEY sets the key of the control plane, required "
        "unless gateway.host is loopback; TIDEGATE_WORKER_KEY sets that of workers (tidegate worker).",
    )
    parser.add_argument(
        "--journal", type=Path, metavar="DIR", help="journal directory for recovery after a restart"
    )
    parser.add_argument("--access-log", action="store_true", help="log one line of JSON per turn")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--secrets-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=_shard, default=(0, 1), help=argparse.SUPPRESS)
    add_parent(parser)
    takes_settings(parser, "tidegate.settings.servers:GatewayCommand")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.gateway.client import ADMIN_KEY, WORKER_KEY
    from tidegate.gateway.server import serve, serve_front
    from tidegate.service.api_key import ENGINE_KEY, ENV_KEY, key_from_environment
    from tidegate.service.serve import Listen
    from tidegate.settings.reading import load
    from tidegate.settings.servers import GatewayCommand

    shield_process()
    settings = load(GatewayCommand, None, rest)
    gateway = settings.gateway
    names = {"admin_key": ADMIN_KEY, "worker_key": WORKER_KEY, "env_key": ENV_KEY, "engine_key": ENGINE_KEY}
    keys = {name: key_from_environment(variable) for name, variable in names.items()}
    secrets = _secrets(arguments, settings, {name: key for name, key in keys.items() if key is not None})
    if not gateway.on_loopback and secrets.get("admin_key") is None:
        raise ConfigError(
            f"gateway.host = {gateway.host!r} accepts connections from other machines: set {ADMIN_KEY}"
        )
    log_to_stderr()
    logging.getLogger("tidegate.gateway.access").setLevel("INFO" if arguments.access_log else "WARNING")
    listen = Listen(gateway.host, gateway.port, arguments.announce, arguments.owned, arguments.fd)
    if gateway.shards > 1 and gateway.keys is not None:
        raise ConfigError(
            f"gateway.shards = {gateway.shards}: clients form groups in one gateway process; remove "
            "gateway.keys, or set gateway.shards to 1"
        )
    if gateway.shards > 1:
        serve_front(gateway.shards, _shard_arguments(arguments, settings), listen, secrets)
    else:
        serve(_options(arguments, settings, secrets), listen)
    return 0


def _secrets(arguments: argparse.Namespace, settings: GatewayCommand, keys: dict[str, str]) -> dict[str, Any]:
    """Returns the secrets passed by the parent process, else those of the settings and environment."""
    if arguments.secrets_fd is not None:
        return {"env_options": {}, "judge": {}, **receive_secrets(arguments.secrets_fd)}
    if settings.gateway.admin_key is not None:
        keys["admin_key"] = settings.gateway.admin_key
    judge = settings.env.judge.resolved().model_dump(mode="json")
    return {"env_options": settings.env.options, "judge": judge, **keys}


def _options(
    arguments: argparse.Namespace, settings: GatewayCommand, secrets: dict[str, Any]
) -> GatewayOptions:
    from tidegate.gateway.engines.engine import PoolOptions
    from tidegate.gateway.options import GatewayOptions, PolicyModel
    from tidegate.gateway.sessions.limits import SessionLimits
    from tidegate.gateway.sharding.shard import id_prefix, journal_of
    from tidegate.loading import load_object

    gateway, clients = settings.gateway, settings.clients
    index, shards = arguments.shard
    journal = arguments.journal
    if journal is not None and shards == 1:  # a shard is given its own part
        journal = journal_of(journal, 0, 1)
    return GatewayOptions(
        model=settings.model.path,
        policies={
            name: PolicyModel(own.path, own.tool_parser, own.train, own.engines, own.adapter)
            for name, own in settings.policies.items()
        },
        public_url=gateway.public_url,
        engine_urls=settings.engine.urls,
        admin_key=secrets.get("admin_key"),
        worker_key=secrets.get("worker_key"),
        tool_parser=gateway.tool_parser,
        structured_output=gateway.structured_output,
        untrained_models=gateway.untrained_models,
        tracing=gateway.tracing,
        environments=_environments(settings, secrets),
        limits=SessionLimits(**settings.limits.model_dump()),
        keys=gateway.keys,
        max_client_groups=clients.max_groups,
        client_sampling=clients.in_training(clients.top_logprobs, clients.routed_experts),
        client_deadline_s=clients.deadline_s,
        conversation_idle_s=gateway.conversation_idle_s,
        feedback_window_s=gateway.feedback_window_s,
        reward_range=gateway.reward_range,
        redact=None if gateway.redact is None else load_object(gateway.redact, {}, "redaction"),
        journal=journal,
        pool=PoolOptions(
            shards=shards,
            key=secrets.get("engine_key"),
            keeps_kv=settings.engine.pause == "in_place",
        ),
        id_prefix=id_prefix(index) if shards > 1 else "",
    )


def _environments(settings: GatewayCommand, secrets: dict[str, Any]) -> EnvironmentService | None:
    """Returns the environments: those at `env.urls`, or of a service that the gateway starts for itself."""
    from tidegate.gateway.environments.client import EnvironmentClient, OwnedEnvironments
    from tidegate.settings.reading import arguments_of
    from tidegate.settings.servers import EnvCommand

    env, gateway = settings.env, settings.gateway
    if env.urls:
        return EnvironmentClient(env.urls, secrets.get("env_key"))
    judge = secrets["judge"]
    if not (env.use or gateway.conversation_rewards or judge.get("url")):
        return None
    command = EnvCommand.model_validate({"env": env.model_dump(exclude={"urls"})})
    environment = {
        "options": secrets["env_options"],
        "conversation_rewards": gateway.conversation_rewards,
        "reward_range": gateway.reward_range,
        "judge": judge,
        "judge_cache": secrets.get("judge_cache"),
    }
    return OwnedEnvironments(arguments_of(command, "env.options", "env.judge"), environment)


def _shard_arguments(arguments: argparse.Namespace, settings: GatewayCommand) -> Callable[[int], list[str]]:
    """Returns a function that makes a shard's command line: the frontend's, with its part of the journal."""
    from tidegate.gateway.sharding.shard import journal_of
    from tidegate.settings.reading import arguments_of

    without = ("gateway.shards", "gateway.port", "gateway.admin_key", "env.options", "env.judge")
    shared = arguments_of(settings, *without)
    if arguments.access_log:
        shared.append("--access-log")

    def of(index: int) -> list[str]:
        own = ["--shard", f"{index}/{settings.gateway.shards}"]
        if arguments.journal is not None:
            own += ["--journal", str(journal_of(arguments.journal, index, settings.gateway.shards))]
        return shared + own

    return of


def _shard(text: str) -> tuple[int, int]:
    index, _, shards = text.partition("/")
    return int(index), int(shards)
