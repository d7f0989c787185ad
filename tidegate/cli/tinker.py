"""`tidegate tinker`: serves snapshots of a Tinker service by SGLang's HTTP protocol."""

from __future__ import annotations

import argparse

from tidegate.cli.commands import Subparsers, add_engine_options, log_to_stderr, takes_settings


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "tinker",
        help="sample at a Tinker service",
        usage="tidegate tinker --tinker.base_model NAME --model.path DIR [options] [--section.key value ...]",
        description="Serve the model of a Tinker service with SGLang's HTTP protocol.",
    )
    add_engine_options(parser)
    takes_settings(parser, "tidegate.settings.servers:TinkerCommand")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.service.api_key import ENGINE_KEY, key_from_environment
    from tidegate.service.process_secrets import receive_secrets, shield_process
    from tidegate.service.serve import Listen
    from tidegate.settings.reading import load
    from tidegate.settings.servers import TinkerCommand
    from tidegate.tinker.engine import TinkerEngine, serve
    from tidegate.tinker.service import service_key

    settings = load(TinkerCommand, None, rest)
    given = {"key": key_from_environment(ENGINE_KEY)}
    if arguments.secrets_fd is not None:
        given = receive_secrets(arguments.secrets_fd)
    shield_process()
    log_to_stderr()
    key = given.get("service_key") or service_key(settings.tinker)
    engine = TinkerEngine(settings.tinker, settings.model.path, arguments.weight_version, key)
    serve(engine, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned), given["key"])
    return 0
