"""`tidegate vllm`: serves a model with vLLM by SGLang's HTTP protocol."""

from __future__ import annotations

import argparse

from tidegate.cli.commands import Subparsers, add_engine_options, engine_key_of, log_to_stderr, takes_settings


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "vllm",
        help="serve a model with vLLM",
        usage="tidegate vllm --engine.python PYTHON --model.path DIR [options] [--section.key value ...]",
        description="Start vLLM from an environment of its own, and serve it with SGLang's HTTP protocol.",
    )
    add_engine_options(parser)
    takes_settings(parser, "tidegate.settings.servers:VLLMCommand")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.service.serve import Listen
    from tidegate.settings.reading import load
    from tidegate.settings.servers import VLLMCommand
    from tidegate.vllm.app import serve
    from tidegate.vllm.process import VLLMOptions

    settings, key = load(VLLMCommand, None, rest), engine_key_of(arguments)
    log_to_stderr()
    engine, version = settings.engine, arguments.weight_version
    options = VLLMOptions(engine.python, settings.model.path, version, tuple(engine.numbered(0)))
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned), key)
    return 0
