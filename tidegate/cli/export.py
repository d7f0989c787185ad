"""`tidegate export`: exports a run's trajectories for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.verbs import Verbs, run_directory

DESCRIPTION = """\
Write a run's training episodes for other tools: --sft as chats (JSONL, one conversation a line), --parquet
as token sequences with mask, logprobs, versions and advantages (one row a sequence).
"""


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "export", help="write a run's trajectories as chats or as a parquet table", description=DESCRIPTION
    )
    verb.add_argument("run_dir", type=Path, metavar="RUN")
    kind = verb.add_mutually_exclusive_group(required=True)
    kind.add_argument("--sft", action="store_true", help="chats, for supervised fine-tuning")
    kind.add_argument("--parquet", action="store_true", help="token sequences")
    verb.add_argument("--min-reward", type=float, default=1.0, help="of --sft: leave out what got less (1.0)")
    verb.add_argument("--out", type=Path, help="the file; RUN/export.jsonl or RUN/export.parquet otherwise")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.trainer.records.export import write_parquet, write_sft

    run_dir = run_directory(arguments.run_dir)
    suffix = "parquet" if arguments.parquet else "jsonl"
    out = arguments.out or run_dir / f"export.{suffix}"
    if arguments.parquet:
        print(f"{write_parquet(run_dir, out)} sequences in {out}")
    else:
        print(f"{write_sft(run_dir, out, arguments.min_reward)} conversations in {out}")
    return 0
