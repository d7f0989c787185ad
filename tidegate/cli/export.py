"""`tidegate export`: exports a run's trajectories for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.commands import Subparsers, run_directory

DESCRIPTION = """\
Write a run's training episodes for other tools. --sft writes chats (JSONL, one conversation per line);
--corrections writes those that users corrected, with the correction as the last reply;
--parquet writes token sequences with mask, logprobs, versions and advantages (one row per sequence).
"""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "export", help="write a run's trajectories as chats or as a parquet table", description=DESCRIPTION
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--sft", action="store_true", help="write chats for supervised fine-tuning")
    kind.add_argument(
        "--corrections", action="store_true", help="write chats that end in a user's correction"
    )
    kind.add_argument("--parquet", action="store_true", help="write token sequences")
    parser.add_argument(
        "--min-reward", type=float, default=1.0, help="with --sft: lowest reward to include (1.0)"
    )
    parser.add_argument("--out", type=Path, help="output file (RUN/export.jsonl or RUN/export.parquet)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.service.directory_lock import refuse_if_in_use
    from tidegate.trainer.records.export import write_corrections, write_parquet, write_sft

    run_dir = run_directory(arguments.run_dir)
    if arguments.out is not None:
        refuse_if_in_use(arguments.out)
    suffix = "parquet" if arguments.parquet else "jsonl"
    out = arguments.out or run_dir / f"export.{suffix}"
    if arguments.parquet:
        print(f"{write_parquet(run_dir, out)} sequences in {out}")
    elif arguments.corrections:
        print(f"{write_corrections(run_dir, out)} corrected conversations in {out}")
    else:
        print(f"{write_sft(run_dir, out, arguments.min_reward)} conversations in {out}")
    return 0
