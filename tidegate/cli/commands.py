"""Functions shared by the commands."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = object


RUNS = Path("runs")


class CommandParser(argparse.ArgumentParser):
    """Suggests the nearest choice in errors."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            message = f"there is no {value!r} among {', '.join(choices)}{did_you_mean(str(value), choices)}"
            raise argparse.ArgumentError(action, message)


def run_directory(path: Path, parent: Path = RUNS) -> Path:
    """Returns an existing path, or the run of this name in `parent`; raises ConfigError otherwise."""
    if path.exists():
        return path
    if (parent / path).is_dir():
        return parent / path
    candidates = [str(directory) for directory in _directories(path.parent)]
    if len(path.parts) == 1:
        candidates += [directory.name for directory in _directories(parent)]
    raise ConfigError(f"{path}: there is no such directory{did_you_mean(str(path), candidates)}")


def _directories(parent: Path) -> list[Path]:
    return [entry for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port, help="0 selects a free one")
    # For parent processes: writes {url, pid} to a file when it is ready, and exits when its stdin closes.
    parser.add_argument("--announce", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--owned", action="store_true", help=argparse.SUPPRESS)


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
