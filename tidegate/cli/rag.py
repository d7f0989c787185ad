"""`tidegate rag`: the retrieval verbs."""

from __future__ import annotations

from tidegate.cli import rag_build, rag_serve
from tidegate.cli.verbs import Verbs

ACTIONS = (rag_build, rag_serve)


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser("rag", help="build a retrieval index and serve it", description="Retrieval.")
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action in ACTIONS:
        action.add(actions)
