"""`tidegate keys`: creates, lists and revokes the project keys of a gateway's clients."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tidegate.cli.commands import Subparsers

FILE = Path("keys.json")
VERBS = {"create": "add a key and print it", "list": "list the keys' names", "revoke": "remove a key"}


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="create, list and revoke the project keys of clients",
        description="Change the file of project keys that gateway.keys names. It has only the keys' hashes; "
        "a gateway follows its changes within seconds.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="ACTION")
    for verb, text in VERBS.items():
        one = verbs.add_parser(verb, help=text, description=f"{text.capitalize()}.")
        if verb != "list":
            one.add_argument("name", metavar="NAME", help="name of the key, as of a program or a team")
        if verb == "create":
            one.add_argument("--calls-per-minute", type=int, metavar="N", help="limit of its model calls")
            one.add_argument("--no-train", action="store_true", help="never train on its calls")
        one.add_argument("--file", type=Path, default=FILE, metavar="FILE", help=f"by default {FILE}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.gateway.project_keys import create_key, read_keys, revoke_key

    file = arguments.file
    if arguments.verb == "create":
        print(
            create_key(
                file,
                arguments.name,
                calls_per_minute=arguments.calls_per_minute,
                train=not arguments.no_train,
            )
        )
        print(f"{file} has its hash; the key itself is shown only now", file=sys.stderr)
    elif arguments.verb == "revoke":
        revoke_key(file, arguments.name)
    else:
        for key in read_keys(file).values():
            created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(key.created))
            limit = "" if key.calls_per_minute is None else f"  {key.calls_per_minute} calls a minute"
            print(f"{key.name:<32} {created}{limit}{'' if key.train else '  not trained on'}")
    return 0
