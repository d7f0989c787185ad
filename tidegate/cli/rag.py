"""`tidegate rag`: the retrieval commands."""

from __future__ import annotations

from tidegate.cli import rag_build, rag_serve
from tidegate.cli.commands import Subparsers

ACTIONS = (rag_build, rag_serve)


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "rag", help="build a retrieval index and serve it", description="Retrieval."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action in ACTIONS:
        action.add(actions)
