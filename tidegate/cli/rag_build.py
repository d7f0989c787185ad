"""`tidegate rag build` and `tidegate rag verify`: builds an index of a corpus, and checks its files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tidegate.cli.commands import Subparsers

DESCRIPTION = """\
Build a retrieval index: documents on disk, vectors, BM25, or both. Rows are {"id", "contents"} (the title in
double quotes on the first line, the text after it) or {"id", "title", "text"}. Repeating the same command
continues an interrupted build.
"""
VERIFY = """\
Read every file of an index completely and compare it with the manifest. Opening an index reads only parts
of large files.
"""


def add(actions: Subparsers) -> None:
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
        choices=["flat", "sq8", "ivf-sq8", "ivf-pq"],
        help="type of the vector index; chosen by size by default",
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
    action.set_defaults(run=run)
    verify = actions.add_parser("verify", help="check the files of an index", description=VERIFY)
    verify.add_argument("index", type=Path, metavar="DIR")
    verify.set_defaults(run=run_verify)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
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
    print(f"{arguments.index} is whole: {len(manifest.files)} files, {manifest.documents:,} documents")
    return 0
