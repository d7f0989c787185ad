"""`tidegate rag`: builds an index of a corpus, checks its files, and serves searches of it over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from tidegate.cli.commands import Subparsers, add_address, log_to_stderr

DESCRIPTION = """\
Build a retrieval index: documents on disk, vectors, BM25, or both. Rows are {"id", "contents"} (the title in
double quotes on the first line, the text after it) or {"id", "title", "text"}. Repeating the same command
continues an interrupted build.
"""
VERIFY = """\
Read every file of an index completely and compare it with the manifest. Opening an index reads only parts
of large files.
"""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "rag", help="build a retrieval index and serve it", description="Retrieval."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_build(actions)
    _add_serve(actions)


def _add_build(actions: Subparsers) -> None:
    action = actions.add_parser("build", help="build an index from a corpus", description=DESCRIPTION)
    action.add_argument(
        "corpus", type=Path, nargs="+", metavar="CORPUS",
        help=".jsonl, .jsonl.gz or .parquet files, or directories of them",
    )  # fmt: skip
    action.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the index")
    action.add_argument(
        "--encoder",
        metavar="NAME",
        help="directory or id of a sentence-transformers model, or 'hash' for tests",
    )
    action.add_argument(
        "--bm25", action="store_true", help="also build a BM25 index (with vectors: hybrid search)"
    )
    action.add_argument(
        "--index",
        choices=["flat", "sq8", "ivf-flat", "ivf-sq8", "ivf-pq"],
        help="type of the vector index; chosen by size by default",
    )
    action.add_argument(
        "--recall",
        type=float,
        metavar="R",
        help="target of recall@10 against exact search, by which an ivf index's nprobe is chosen (0.95)",
    )
    action.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of threads (all cores)",
    )
    action.add_argument("--device", default="cpu", help="device of the encoder: cpu, cuda, cuda:1")
    action.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    action.add_argument("--query-prefix", metavar="TEXT", help="replaces the encoder's prefix")
    action.add_argument("--passage-prefix", metavar="TEXT", help="replaces the encoder's prefix")
    action.add_argument("--replace", action="store_true", help="replace an existing index")
    action.set_defaults(run=run_build)
    verify = actions.add_parser("verify", help="check the files of an index", description=VERIFY)
    verify.add_argument("index", type=Path, metavar="DIR")
    verify.set_defaults(run=run_verify)


def _add_serve(actions: Subparsers) -> None:
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
    action.set_defaults(run=run_serve)


def run_build(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.progress import Progress
    from tidegate.rag.build import Plan, build
    from tidegate.rag.encoders import EncoderPrefixes

    prefixes = None
    if arguments.query_prefix is not None or arguments.passage_prefix is not None:
        prefixes = EncoderPrefixes(arguments.query_prefix or "", arguments.passage_prefix or "")
    plan = Plan(
        sources=arguments.corpus,
        out=arguments.out,
        encoder=arguments.encoder,
        bm25=arguments.bm25,
        kind=arguments.index,
        threads=arguments.threads,
        device=arguments.device,
        dtype=arguments.dtype,
        prefixes=prefixes,
        recall=arguments.recall,
        replace=arguments.replace,
    )
    with Progress() as progress:
        manifest = build(plan, progress)
    print(f"{arguments.out}: {manifest.documents:,} documents, {', '.join(manifest.modes)}")
    return 0


def run_verify(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.rag.index.manifest import Manifest

    manifest = Manifest.read(arguments.index)
    manifest.check_files(arguments.index, full=True)
    print(f"{arguments.index} is intact: {len(manifest.files)} files, {manifest.documents:,} documents")
    return 0


def run_serve(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.rag.client import RAG_KEY
    from tidegate.rag.server.app import serve
    from tidegate.rag.server.batcher import BatchOptions
    from tidegate.rag.server.service import RagOptions
    from tidegate.service.api_key import key_from_environment
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
        api_key=key_from_environment(RAG_KEY),
    )
    serve(options, Listen(arguments.host, arguments.port, arguments.announce, arguments.owned))
    return 0
