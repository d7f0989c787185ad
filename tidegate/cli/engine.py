"""`tidegate engine`: a model behind SGLang's HTTP protocol."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.verbs import Verbs, add_address, log_to_stderr


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "engine", help="serve a model", description="Serve a model with SGLang's HTTP protocol."
    )
    verb.add_argument("--model", type=Path, required=True, help="a directory in Hugging Face format")
    verb.add_argument("--weight-version", type=int, default=0, help="the label of these weights")
    verb.add_argument("--device", default="cpu")
    verb.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    verb.add_argument("--threads", type=int, default=1)
    verb.add_argument("--max-slots", type=int, default=64, help="requests decoded at the same time")
    verb.add_argument("--max-context", type=int, default=1024, help="prompt + output tokens of a request")
    verb.add_argument(
        "--prefix-cache-mb",
        type=int,
        default=256,
        help="kept of earlier sequences for follow-up turns; 0: none",
    )
    add_address(verb, 30000)
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.engine.options import EngineOptions
    from tidegate.engine.server import serve
    from tidegate.serve import Listen

    log_to_stderr()
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_slots=arguments.max_slots,
        max_context=arguments.max_context,
        prefix_cache_mb=arguments.prefix_cache_mb,
        weight_version=arguments.weight_version,
    )
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned))
    return 0
