"""What the verbs share."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Verbs = object


RUNS = Path("runs")


class CommandParser(argparse.ArgumentParser):
    """Names the nearest word to one that is none of those to choose from."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(one) for one in action.choices]
            words = f"there is no {value!r} among {', '.join(known)}{did_you_mean(str(value), known)}"
            raise argparse.ArgumentError(action, words)


def run_directory(wanted: Path, parent: Path = RUNS) -> Path:
    """A directory as it was given, or a run's name among the runs. Raises ConfigError with the nearest."""
    if wanted.exists():
        return wanted
    if (parent / wanted).is_dir():
        return parent / wanted
    near = {str(one): one.name for one in _directories(wanted.parent)}
    near |= {one.name: one.name for one in _directories(parent)} if len(wanted.parts) == 1 else {}
    raise ConfigError(f"{wanted}: there is no such directory{did_you_mean(str(wanted), near)}")


def _directories(parent: Path) -> list[Path]:
    return [one for one in parent.iterdir() if one.is_dir()] if parent.is_dir() else []


def add_address(verb: argparse.ArgumentParser, port: int) -> None:
    verb.add_argument("--host", default="127.0.0.1")
    verb.add_argument("--port", type=int, default=port, help="0 takes a free one")
    # For a program that starts it: {url, pid} is written there once it serves, and it ends with its stdin.
    verb.add_argument("--announce", type=Path, help=argparse.SUPPRESS)
    verb.add_argument("--owned", action="store_true", help=argparse.SUPPRESS)


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
