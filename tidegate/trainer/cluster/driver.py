"""The command's side of a run on a cluster: it starts it, shows what it hears, and passes Ctrl-C on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from tidegate.config import Settings
from tidegate.errors import STOPPED, StartError, TrainingError
from tidegate.observer import Observer
from tidegate.trainer.cluster.actor_calls import LostError, meaning
from tidegate.trainer.cluster.connect import connected, reserved, still_connected
from tidegate.trainer.cluster.environment import ClusterNode, passed_on
from tidegate.trainer.cluster.observer_relay import Told, tell
from tidegate.trainer.cluster.placement import HOME, Placement
from tidegate.trainer.cluster.run_actor import RunActor, RunJob, RunSpec
from tidegate.trainer.processes.provider import ProcessProvider

LOOK_S = 0.25
NEWS_S = 300.0
"""A run that is lost is known at once; one that writes its report says nothing for a while."""
ARRIVE_S = 120.0
GO_ON = "Go on from the last checkpoint with --resume"


def drive(
    cluster: str, settings: Settings, make: Callable[[Observer, ProcessProvider], RunJob], observer: Observer
) -> int:
    """Run a job on a cluster; returns its exit code. `make` is called there.

    Ctrl-C (or SIGTERM) once asks the job to stop, twice ends everything at once; before there is a job, once
    is enough. Raises TidegateError, also where the cluster is lost.
    """
    placement = Placement.of(settings)
    environment = passed_on(os.environ, settings.cluster.environment)
    errand = RunSpec(settings.run.name, settings.run_dir, Path.cwd(), environment, make)
    with connected(cluster) as home:
        patience_s = settings.cluster.patience_s
        with _losses_told(), reserved(settings.run.name, placement, home, patience_s) as seats:
            head = seats.take(HOME, RunActor, errand, seats)
            try:
                _compare(head)
                with _signals() as signals:
                    return _follow(head, observer, signals)
            finally:
                with contextlib.suppress(ConnectionError):  # with the cluster gone, it is gone
                    still_connected()
                    ray.kill(head)


def _compare(head: Any) -> None:
    """Raises StartError where the run's node is not as this one."""
    there: ClusterNode = ray.get(head.about.remote(), timeout=ARRIVE_S)
    unlike = there.unlike(ClusterNode("of this command"))
    if unlike is not None:
        raise StartError(f"the run cannot begin: {unlike}")


def _follow(head: Any, observer: Observer, signals: list[int]) -> int:
    """Until the job has ended, or must end."""
    running = head.run.remote()
    asked = False
    while len(signals) < 2:
        still_connected()
        ended, _ = ray.wait([running], timeout=LOOK_S)
        for told in _news(head, signals):
            tell(told, observer)
        if ended:
            code: int = ray.get(running)
            return code
        if signals and not asked:
            asked = True
            head.stop.remote()
    return STOPPED


def _news(head: Any, signals: list[int]) -> list[Told]:
    """What the run told since the last time; nothing where everything is to end before it answers."""
    coming = head.news.remote()
    deadline = time.monotonic() + NEWS_S
    while not ray.wait([coming], timeout=LOOK_S)[0]:
        still_connected()
        if len(signals) > 1:
            return []
        if time.monotonic() > deadline:
            break
    told: list[Told] = ray.get(coming, timeout=0)
    return told


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Those that came: they are acted on between two looks."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _losses_told() -> Iterator[None]:
    """Raises TidegateError for what Ray raises; through ray:// a lost cluster is no RayError."""
    try:
        yield
    except RayError as error:
        found = meaning(error, "the run")
        if isinstance(found, LostError):
            raise TrainingError(f"{found}. {GO_ON}") from error
        raise found from error
    except BrokenPipeError:  # of who reads what is shown
        raise
    except ConnectionError as error:
        raise TrainingError(f"the cluster was lost: its head node, or the way to it. {GO_ON}") from error
