"""`tidegate export`: exports a run's trajectories for other tools."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from tidegate.cli.commands import Subparsers, run_directory

FORMAT_NAMES = ("tinker", "trl", "verl", "prime-rl", "atif")
"""Keys of FORMATS, whose module is imported when it is needed."""
DESCRIPTION = """\
Write a run's training episodes, or its metrics, for other tools.
--sft writes chats (JSONL, one conversation per line);
--corrections writes those that users corrected, with the correction as the last reply;
--parquet writes token sequences with mask, logprobs, versions and advantages (one row per sequence);
--for writes the batches' token sequences as another trainer's rows, or episodes as ATIF documents (JSONL);
--csv writes the metrics of each step (one row per step).
"""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a run's trajectories as chats or as a parquet table, or its metrics as CSV",
        description=DESCRIPTION,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--sft", action="store_true", help="write chats for supervised fine-tuning")
    kind.add_argument(
        "--corrections", action="store_true", help="write chats that end in a user's correction"
    )
    kind.add_argument("--parquet", action="store_true", help="write token sequences")
    kind.add_argument(
        "--for", dest="format", choices=FORMAT_NAMES, help="write rows of another trainer, or ATIF documents"
    )
    kind.add_argument("--csv", action="store_true", help="write the metrics of each step")
    parser.add_argument(
        "--min-reward", type=float, default=1.0, help="with --sft: lowest reward to include (1.0)"
    )
    parser.add_argument("--policy", help="with --for: policy whose sequences are written, of several")
    parser.add_argument("--out", type=Path, help="output file (RUN/export.jsonl, .parquet or .csv)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.service.directory_lock import refuse_if_in_use
    from tidegate.trainer.records.export import write_corrections, write_format, write_parquet, write_sft
    from tidegate.trainer.records.formats import FORMATS

    run_dir = run_directory(arguments.run_dir)
    if arguments.out is not None:
        refuse_if_in_use(arguments.out)
    suffix = "parquet" if arguments.parquet else "csv" if arguments.csv else "jsonl"
    out = arguments.out or run_dir / f"export.{suffix}"
    if arguments.parquet:
        print(f"{write_parquet(run_dir, out)} sequences in {out}")
    elif arguments.csv:
        print(f"{_write_metrics(run_dir, out)} steps in {out}")
    elif arguments.format:
        print(f"{write_format(run_dir, out, arguments.format, arguments.policy)} rows in {out}")
        print(f"{arguments.format} has no place for: {FORMATS[arguments.format].lacks}")
    elif arguments.corrections:
        print(f"{write_corrections(run_dir, out)} corrected conversations in {out}")
    else:
        print(f"{write_sft(run_dir, out, arguments.min_reward)} conversations in {out}")
    return 0


def _write_metrics(run_dir: Path, out: Path) -> int:
    """Writes the metrics of the steps that count, without those that a resume discarded; returns the rows."""
    from tidegate.viewer.run_files import read_run

    run = read_run(run_dir)
    with out.open("w", newline="", encoding="utf-8") as file:
        names = ["step", *sorted(run.keys() - {"step"})]
        table = csv.DictWriter(file, names, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(run.rows)
    return len(run.rows)
