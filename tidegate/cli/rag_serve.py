"""`tidegate rag serve`: serves searches of an index over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from tidegate.cli.verbs import Verbs, add_address, log_to_stderr


def add(actions: Verbs) -> None:
    action = actions.add_parser("serve", help="answer searches", description="Answer searches of an index.")
    action.add_argument("directory", type=Path, metavar="DIR", help="what `tidegate rag build` wrote")
    action.add_argument("--mode", help="dense, bm25 or hybrid, where a request does not say")
    action.add_argument("--k", type=int, default=5, help="documents, where a request does not say")
    action.add_argument("--threads", type=int, default=1, help="of one search")
    action.add_argument("--device", default="cpu", help="of the encoder: cpu, cuda, cuda:1")
    action.add_argument(
        "--encoder", metavar="NAME", help="where the encoder is now, if the index names another place"
    )
    action.add_argument(
        "--window-ms", type=float, default=2.0, help="how long a batch is gathered from its first query on"
    )
    action.add_argument("--max-batch", type=int, default=64, help="queries of a batch")
    action.add_argument("--queue", type=int, default=4096, help="queries that may wait; more are refused")
    action.add_argument("--deadline-s", type=float, default=30.0, help="how long a query may wait")
    action.add_argument("--cache-mb", type=int, default=64, help="of answers that are kept; 0: none")
    action.epilog = "TIDEGATE_RAG_KEY in the environment guards the server; needed beyond loopback."
    add_address(action, 8100)
    action.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.rag.client import RAG_KEY
    from tidegate.rag.server.batcher import BatchOptions
    from tidegate.rag.server.server import serve
    from tidegate.rag.server.service import RagOptions
    from tidegate.service.serve import Listen

    log_to_stderr()
    logging.getLogger("faiss").setLevel("WARNING")  # says which builds of itself it does not find
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
