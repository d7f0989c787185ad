"""`tidegate rag build`: an index from a corpus."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tidegate.cli.verbs import Verbs


def add(actions: Verbs) -> None:
    action = actions.add_parser("build", help="an index from a corpus", description="Build an index.")
    action.add_argument(
        "corpus", type=Path, nargs="+", metavar="CORPUS", help=".jsonl, .jsonl.gz or .parquet"
    )
    action.add_argument("--out", type=Path, required=True, metavar="DIR")
    action.add_argument("--encoder", required=True, help="'hash', or a sentence-transformers model")
    action.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    action.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.rag.build import Plan, build

    manifest = build(
        Plan(arguments.corpus, arguments.out, arguments.encoder, arguments.threads),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(f"{arguments.out}: {manifest.documents:,} documents, {', '.join(manifest.modes)}")
    return 0
