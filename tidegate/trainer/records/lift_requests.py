"""A person's requests to lift quarantines, written by `tidegate tasks` for the run's trainer.

Each request is a file of its own, so that none replaces another. The trainer enters the lifts in the ledger,
then removes the file: after a crash between the two, the tasks are not quarantined any more and nothing is
repeated.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

from tidegate.errors import TidegateError
from tidegate.service.serve import write_atomically

DIRECTORY = "lifts"
CHECK_S = 0.5


def request_lift(run_dir: Path, tasks: Iterable[str]) -> None:
    """Write a request to lift the quarantine of tasks, for the run's trainer or the next one."""
    directory = run_dir / DIRECTORY
    directory.mkdir(exist_ok=True)
    # By time: requests are carried out in the order of their names.
    name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
    write_atomically(directory / name, json.dumps(sorted(tasks)))


def requested_lifts(run_dir: Path) -> set[str]:
    """Return the tasks of the requests that were not carried out yet. Raises TidegateError."""
    return {task for _, tasks in _requests(run_dir) for task in tasks}


async def lift_requested(
    run_dir: Path, lift: Callable[[str], bool], durable: Callable[[], Awaitable[None]]
) -> list[str]:
    """Carry out all requests.

    Args:
        run_dir: Directory of the run.
        lift: Lifts the quarantine of a task; returns whether it was quarantined.
        durable: Forces the ledger to disk.

    Returns:
        The tasks that were quarantined.

    Raises:
        TidegateError: A request cannot be read.
    """
    requests = await asyncio.to_thread(lambda: list(_requests(run_dir)))
    lifted = [task for _, tasks in requests for task in tasks if lift(task)]
    if requests:
        # Before the requests are deleted: after the loss of the machine, one of the two must be left.
        await durable()
    for path, _ in requests:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    return lifted


async def watch_lifts(
    run_dir: Path,
    lift: Callable[[str], bool],
    durable: Callable[[], Awaitable[None]],
    note: Callable[[str], None],
) -> None:
    """Carry out requests as they come."""
    while True:
        if lifted := await lift_requested(run_dir, lift, durable):
            note(f"the quarantine of {len(lifted)} tasks was lifted; they are issued again in their order")
        await asyncio.sleep(CHECK_S)


def _requests(run_dir: Path) -> Iterator[tuple[Path, list[str]]]:
    for path in sorted((run_dir / DIRECTORY).glob("*.json")):
        try:
            yield path, [str(task) for task in json.loads(path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            continue  # the trainer carried it out meanwhile
        except (ValueError, TypeError) as error:
            raise TidegateError(f"{path} cannot be read ({error}); remove it") from error
