"""`tidegate vllm`: serves a model with vLLM by SGLang's HTTP protocol."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.verbs import Verbs, add_address, log_to_stderr


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "vllm",
        help="serve a model with vLLM",
        description="Start vLLM from an environment of its own, and serve it with SGLang's HTTP protocol.",
    )
    verb.add_argument(
        "--python", type=Path, required=True, help="the interpreter of the environment that vLLM is in"
    )
    verb.add_argument("--model", type=Path, required=True, help="a directory in Hugging Face format")
    verb.add_argument("--weight-version", type=int, default=0, help="the label of these weights")
    verb.add_argument(
        "--argument", action="append", default=[], help="passed to vLLM as it is; give it once for each"
    )
    add_address(verb, 30000)
    verb.set_defaults(run=run)


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
