"""`tidegate rag serve`: serves searches of an index over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from tidegate.cli.commands import Subparsers, add_address, log_to_stderr


def add(actions: Subparsers) -> None:
    action = actions.add_parser("serve", help="serve searches", description="Serve searches of an index.")
    action.add_argument(
        "directory", type=Path, metavar="DIR", help="an index that `tidegate rag build` wrote"
    )
    action.add_argument("--mode", help="default of requests: dense, bm25 or hybrid")
    action.add_argument("--k", type=int, default=5, help="default number of documents")
    action.add_argument("--threads", type=int, default=1, help="threads per search")
    action.add_argument("--device", default="cpu", help="device of the encoder: cpu, cuda, cuda:1")
    action.add_argument(
        "--encoder", metavar="NAME", help="directory of the encoder, if it was moved after the build"
    )
    action.add_argument(
        "--window-ms", type=float, default=2.0, help="time to wait for further queries of a batch"
    )
    action.add_argument("--max-batch", type=int, default=64, help="maximum queries per batch")
    action.add_argument("--queue", type=int, default=4096, help="maximum waiting queries; more are refused")
    action.add_argument("--deadline-s", type=float, default=30.0, help="maximum waiting time of a query")
    action.add_argument("--cache-mb", type=int, default=64, help="size of the result cache; 0 disables it")
    action.epilog = (
        "The environment variable TIDEGATE_RAG_KEY sets the API key, required unless --host is loopback."
    )
    add_address(action, 8100)
    action.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.rag.client import RAG_KEY
    from tidegate.rag.server.app import serve
    from tidegate.rag.server.batcher import BatchOptions
    from tidegate.rag.server.service import RagOptions
    from tidegate.service.serve import Listen

    log_to_stderr()
    logging.getLogger("faiss").setLevel("WARNING")  # logs which of its CPU variants are missing
    options = RagOptions(
        directory=arguments.directory,
        mode=arguments.mode,
        k=arguments.k,
        threads=arguments.threads,
        device=arguments.device,
        encoder=arguments.encoder,
        batches=BatchOptions(
            arguments.window_ms / 1e3, arguments.max_batch, arguments.queue, arguments.deadline_s
        ),
        cache_bytes=arguments.cache_mb * 2**20,
        api_key=os.environ.get(RAG_KEY),
    )
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned))
    return 0
