"""`tidegate init`: creates a project that is ready to train."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from tidegate.cli.commands import Subparsers


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "init",
        help="create a project",
        description="Create a directory with an agent, an environment, settings, a test and a small base "
        "model. It can be trained at once; edit the files to make it your own.",
    )
    parser.add_argument("name", help="name of the directory, created in the current one")
    parser.add_argument(
        "--stateful", action="store_true", help="an environment with a state and tools, and the agent `chat`"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.program import program, python
    from tidegate.scaffold.init import FILES, STATEFUL_FILES, make_project

    project = make_project(arguments.name, Path.cwd(), arguments.stateful)
    files = STATEFUL_FILES if arguments.stateful else FILES
    print(
        f"Made {project.name}/: {', '.join(files)} and a base model.\n\n"
        "Next:\n"
        f"  cd {project.name}{_missing(python())}\n"
        f"  {python()} -m pytest\n"
        f"  {program()} doctor\n"
        f"  {program()} train config.toml"
    )
    return 0


def _missing(python: str) -> str:
    """Returns the command that installs missing dependencies; empty if there are none."""
    needed = {"torch": "'tidegate[train]'", "pytest": "pytest"}
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    return f"\n  {python} -m pip install {' '.join(missing)}" if missing else ""
