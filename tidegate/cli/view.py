"""`tidegate view`: shows a run in the browser, or lists the runs."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import RUNS, Subparsers, add_address, existing_directory
from tidegate.errors import ConfigError, StartError

if TYPE_CHECKING:
    import socket

    from tidegate.service.serve import Listen

PORT = 8080


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "view",
        help="show a run in the browser, down to single tokens; compare several",
        description="Serve a read-only page on the files of a run, or of several side by side, during the "
        "run or afterwards. Without RUN, list the runs.",
    )
    parser.add_argument(
        "run_dirs", metavar="RUN", nargs="*", type=Path, help="run directory, or its name in --dir"
    )
    parser.add_argument("--dir", type=Path, default=RUNS, help="directory of the runs (runs)")
    add_address(parser, PORT)
    # Without --port a free port is used if 8080 is taken.
    parser.set_defaults(run=run, port=None)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    if not arguments.run_dirs:
        return _list(arguments.dir)
    from tidegate.service.local_only import is_loopback
    from tidegate.service.serve import Listen, url_of
    from tidegate.viewer.dashboard.app import serve
    from tidegate.viewer.dashboard.comparison import MOST_RUNS
    from tidegate.viewer.dashboard.run import FollowedRun

    paths = [existing_directory(path, arguments.dir) for path in arguments.run_dirs]
    resolved = [path.resolve() for path in paths]
    if again := [path for path in paths if resolved.count(path.resolve()) > 1]:
        raise ConfigError(f"{again[0]} is named twice; name each run once")
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"{len(paths)} runs are too many for one page, which shows at most {MOST_RUNS}")
    followed = [FollowedRun(path) for path in paths]
    listen = Listen(arguments.host, arguments.port or 0, arguments.announce, arguments.owned)
    sock = _bind(listen, chosen=arguments.port is not None)
    shown = f"{paths[0]} is" if len(paths) == 1 else f"{len(paths)} runs are"
    print(f"{shown} shown at {url_of(sock)}  (Ctrl-C ends this)", flush=True)
    if not is_loopback(arguments.host):
        warning = "anyone who reaches this address can read the run, because it has no access control"
        print(f"tidegate: --host {arguments.host}: {warning}", file=sys.stderr)
    serve(followed, listen, sock)
    return 0


def _bind(listen: Listen, *, chosen: bool) -> socket.socket:
    """Binds the chosen port; else 8080, or a free one if that is taken."""
    from dataclasses import replace

    from tidegate.service.serve import bind

    if chosen:
        return bind(listen)
    try:
        return bind(replace(listen, port=PORT))
    except StartError:
        return bind(replace(listen, port=0))


def _list(parent: Path) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tidegate.viewer.dashboard.run import list_runs
    from tidegate.viewer.formatting import number, printable
    from tidegate.viewer.run_files import read_run

    runs = list_runs(parent)
    if not runs:
        raise ConfigError(
            f"there are no runs in {parent}: name one (tidegate view DIRECTORY), or tidegate train one"
        )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "step", "held-out reward", "last written"):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    for path in runs:
        files = read_run(path)
        held = [value for _, value in files.series("eval/reward")]
        told = " → ".join(dict.fromkeys(number(value) for value in (*held[:1], *held[-1:]))) or "–"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime((path / "metrics.jsonl").stat().st_mtime))
        table.add_row(Text(printable(path.name)), number(files.last("step"), 0), told, when)
    Console().print(table)
    found = "" if parent == RUNS else f" --dir {shlex.quote(str(parent))}"
    names = [shlex.quote(path.name) for path in runs[:2]]
    print(f"\nShow one:     tidegate view {names[0]}{found}")
    if len(runs) > 1:
        print(f"Compare some: tidegate view {' '.join(names)}{found}")
    return 0
