"""`tidegate vllm`: serves a model with vLLM by SGLang's HTTP protocol."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.commands import Subparsers, add_address, log_to_stderr


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "vllm",
        help="serve a model with vLLM",
        description="Start vLLM from an environment of its own, and serve it with SGLang's HTTP protocol.",
    )
    parser.add_argument(
        "--python", type=Path, required=True, help="Python interpreter of the environment with vLLM"
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory in Hugging Face format")
    parser.add_argument("--weight-version", type=int, default=0, help="version number of these weights")
    parser.add_argument(
        "--argument", action="append", default=[], help="argument passed to vLLM unchanged; may be repeated"
    )
    add_address(parser, 30000)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.service.serve import Listen
    from tidegate.vllm.app import serve
    from tidegate.vllm.options import VLLMOptions

    log_to_stderr()
    options = VLLMOptions(
        arguments.python, arguments.model, arguments.weight_version, tuple(arguments.argument)
    )
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned))
    return 0
