"""The program `tidegate`. Each command is a module that imports its dependencies when it runs, so `--help`
is fast."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from tidegate import __version__
from tidegate.cli.commands import CommandParser, list_settings, mistyped_option
from tidegate.errors import STOPPED, StartError, TidegateError
from tidegate.program import advise_extra

COMMANDS = (
    "init", "convert", "doctor", "sft", "train", "serve", "worker", "evaluate", "judge", "gateway", "keys",
    "env", "engine", "vllm", "tinker", "rag", "audit", "tasks", "versions", "view", "report", "replay",
    "export", "simulate",
)  # fmt: skip
"""The modules of the commands, in the order of the help."""

EXTRAS = {
    "torch": "train",
    "safetensors": "train",
    "transformers": "gateway",
    "tokenizers": "gateway",
    "gguf": "gguf",
    "accelerate": "gguf",
    "sentence_transformers": "rag",
    "mcp": "gateway",
    "zstandard": "gateway",
}
"""Optional packages that commands import, with the extras that install them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code. A `TidegateError` is printed as one message, without
    traceback."""
    _use_own_plot_backend()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale such as LC_ALL=C cannot encode every text
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    model = getattr(arguments, "settings_model", None)
    if mistyped := mistyped_option(parser, arguments, rest):
        parser.error(mistyped)
    if rest and model is None:
        parser.error(f"unknown arguments for {arguments.command}: {' '.join(rest)}")
    run: Callable[[argparse.Namespace, list[str]], int] = arguments.run
    try:
        if model is not None and arguments.settings:
            return list_settings(model)
        return run(arguments, rest)
    except TidegateError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        needed = _extra(error)
        if needed is None:
            raise
        print(f"tidegate: `tidegate {arguments.command}` {needed}", file=sys.stderr)
        return StartError.exit_code
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # the reader of a pipe exited: `tidegate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _use_own_plot_backend() -> None:
    """Removes a notebook's backend of matplotlib: its module may be missing here, and plots are files."""
    if os.environ.get("MPLBACKEND", "").startswith("module://"):
        del os.environ["MPLBACKEND"]


def _extra(error: ModuleNotFoundError) -> str | None:
    """Returns how to install a missing module; None if it is not an optional one."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    return None if extra is None else f"needs {module}, which is not installed: {advise_extra(extra)}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tidegate", description="Trains the model behind any agent by reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"tidegate {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        importlib.import_module(f"tidegate.cli.{command}").add(subparsers)
    return parser
