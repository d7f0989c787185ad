"""Functions shared by the commands."""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean

if TYPE_CHECKING:
    from tidegate.trainer.start import Resume

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = object

RUNS = Path("runs")


class CommandParser(argparse.ArgumentParser):
    """Suggests the nearest choice in errors; options are not abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            message = f"there is no {value!r} among {', '.join(choices)}{did_you_mean(str(value), choices)}"
            raise argparse.ArgumentError(action, message)


def mistyped_option(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]
) -> str | None:
    """Returns the message for a word that is nearly an option of the command; None if there is none."""
    options: list[str] = []
    inner: argparse.ArgumentParser | None = parser
    while inner is not None:
        commands = [one for one in inner._actions if isinstance(one, argparse._SubParsersAction)]
        shown = [one for one in inner._actions if one.help != argparse.SUPPRESS]
        options += [name for one in shown for name in one.option_strings if name.startswith("--")]
        inner = commands[0].choices.get(str(getattr(arguments, commands[0].dest, None))) if commands else None
    for word in rest:
        name = word.partition("=")[0]
        if not name.startswith("-") or "." in name:
            continue
        spelled = f"--{name.lstrip('-').lower().replace('_', '-')}"
        if close := difflib.get_close_matches(spelled, options, n=1, cutoff=0.8):
            return f"unknown option {name}; did you mean {close[0]}?"
    return None


def takes_settings(parser: argparse.ArgumentParser, model: str = "tidegate.config:Settings") -> None:
    """Lets a command take `--section.key value`, and `--settings`, which lists the settings that it reads.

    Its `run` receives the words that are none of its own options. `model` names the class of its settings.
    """
    parser.add_argument("--settings", action="store_true", help="list every setting with its default")
    parser.epilog = f"{parser.epilog or ''} Settings are given as --section.key value."
    parser.set_defaults(settings_model=model)


def takes_resume(parser: argparse.ArgumentParser, run: str) -> None:
    """Adds `--resume [auto]` and `--fresh`, which exclude each other; `resume_of` reads the former."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--resume", nargs="?", const=True, default=False, metavar="auto",
        help=f"continue from the newest checkpoint of the {run}; auto: if there is one, else start",
    )  # fmt: skip
    how.add_argument(
        "--fresh", action="store_true", help=f"rename an existing {run} of this name and start a new one"
    )


def resume_of(arguments: argparse.Namespace, rest: list[str]) -> Resume:
    """Returns the value of `--resume`; a file that follows the option goes back to the other words."""
    if arguments.resume not in (False, True, "auto"):
        rest.insert(0, arguments.resume)
        arguments.resume = True
    resume: Resume = arguments.resume
    return resume


def list_settings(model: str) -> int:
    from tidegate.settings.sections import known_keys

    module, _, name = model.partition(":")
    for key, default, text in known_keys(getattr(importlib.import_module(module), name)):
        print(f"{key:<31} {default:<15} {' '.join(text.split())}")
    return 0


def run_directory(path: Path) -> Path:
    """Returns the directory of a run, as `existing_directory` finds it; raises ConfigError without a run."""
    from tidegate.viewer import run_files

    found = existing_directory(path)
    run_files.run_directory(found)
    return found


def enter_start_directory(config: Path, *paths: Path | None) -> list[Any]:
    """Makes the directory in which a run was started the working directory, and prints it.

    Args:
        config: The run's `config.toml`. With a settings file of another kind nothing is changed.
        paths: Paths that refer to the working directory so far.

    Returns:
        These paths, absolute if the working directory was changed.
    """
    from tidegate.settings.reading import start_directory

    start = start_directory(config)
    if start is None or start.samefile(Path.cwd()):
        return list(paths)
    absolute = [None if path is None else path.absolute() for path in paths]
    os.chdir(start)
    print(f"tidegate: paths are relative to {start}, where the run was started", file=sys.stderr)
    return absolute


def existing_directory(path: Path, parent: Path = RUNS) -> Path:
    """Returns an existing path, or the directory of this name in `parent`; raises ConfigError otherwise."""
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
    add_parent(parser)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of an engine's server: its version, its address and its key."""
    parser.add_argument("--weight-version", type=int, default=0, help="version number of these weights")
    add_address(parser, 30000)
    parser.add_argument("--secrets-fd", type=int, help=argparse.SUPPRESS)
    parser.epilog = "The environment variable TIDEGATE_ENGINE_KEY sets a key that all calls but /health need."


def engine_key_of(arguments: argparse.Namespace) -> str | None:
    """Returns the key that the parent process passes, else that in the environment, and shields it."""
    from tidegate.service.api_key import ENGINE_KEY, key_from_environment
    from tidegate.service.process_secrets import receive_secrets, shield_process

    key = key_from_environment(ENGINE_KEY)
    if arguments.secrets_fd is not None:
        key = receive_secrets(arguments.secrets_fd)["key"]
    if key is not None:
        shield_process()
    return key


def add_parent(parser: argparse.ArgumentParser) -> None:
    """Adds options for parent processes: the server writes {url, pid} to a file when it is ready, and exits
    when its stdin closes."""
    parser.add_argument("--announce", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--owned", action="store_true", help=argparse.SUPPRESS)


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
