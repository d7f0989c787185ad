"""Client of a run on a cluster: starts it, shows its events and forwards Ctrl-C."""

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
from tidegate.trainer.cluster.actors import LostError, translate
from tidegate.trainer.cluster.connect import connected, reserved, still_connected
from tidegate.trainer.cluster.environment import ClusterNode, forwarded_variables
from tidegate.trainer.cluster.placement import HOME, Placement
from tidegate.trainer.cluster.run_actor import Event, RunActor, RunJob, RunSpec
from tidegate.trainer.processes.provider import ProcessProvider

POLL_S = 0.25
EVENTS_TIMEOUT_S = 300.0
"""Timeout of a poll for events; a run that writes its report does not reply for a while."""
CREATE_TIMEOUT_S = 120.0
RESUME_HINT = "Resume from the last checkpoint with --resume"


def drive(
    cluster: str, settings: Settings, make: Callable[[Observer, ProcessProvider], RunJob], observer: Observer
) -> int:
    """Run the job that `make` creates on the cluster; returns its exit code. Raises TidegateError.

    The first Ctrl-C (or SIGTERM) stops the job after the current step, the second ends everything at once.
    `observer` receives the run's events.
    """
    placement = Placement.of(settings)
    environment = forwarded_variables(os.environ, settings.cluster.environment)
    spec = RunSpec(settings.run.name, settings.run_dir, Path.cwd(), environment, make)
    with connected(cluster) as home:
        timeout_s = settings.cluster.timeout_s
        with _translate_errors(), reserved(settings.run.name, placement, home, timeout_s) as slots:
            actor = slots.create_actor(HOME, RunActor, spec, slots)
            try:
                _check_node(actor)
                with _signals() as signals:
                    return _wait_for_job(actor, observer, signals)
            finally:
                with contextlib.suppress(ConnectionError):  # a lost cluster has ended the actor
                    still_connected()
                    ray.kill(actor)


def _check_node(actor: Any) -> None:
    there: ClusterNode = ray.get(actor.about.remote(), timeout=CREATE_TIMEOUT_S)
    mismatch = there.mismatch(ClusterNode("of this command"))
    if mismatch is not None:
        raise StartError(f"the run cannot start: {mismatch}")


def _wait_for_job(actor: Any, observer: Observer, signals: list[int]) -> int:
    """Forward events and signals until the job has ended, or a second signal arrives."""
    running = actor.run.remote()
    stopping = False
    while len(signals) < 2:
        still_connected()
        ended, _ = ray.wait([running], timeout=POLL_S)
        for method, arguments in _events(actor, signals):
            getattr(observer, method)(*arguments)
        if ended:
            code: int = ray.get(running)
            return code
        if signals and not stopping:
            stopping = True
            actor.stop.remote()
    return STOPPED


def _events(actor: Any, signals: list[int]) -> list[Event]:
    """Return the events since the last call; none if a second signal arrives before the reply."""
    reply = actor.take_events.remote()
    deadline = time.monotonic() + EVENTS_TIMEOUT_S
    while not ray.wait([reply], timeout=POLL_S)[0]:
        still_connected()
        if len(signals) > 1:
            return []
        if time.monotonic() > deadline:
            break
    # After the deadline this raises, as there is no reply.
    events: list[Event] = ray.get(reply, timeout=0)
    return events


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Translate Ray's errors into TidegateErrors; through ray:// a lost cluster is not a RayError."""
    try:
        yield
    except RayError as error:
        translated = translate(error, "the run")
        if isinstance(translated, LostError):
            raise TrainingError(f"{translated}. {RESUME_HINT}") from error
        raise translated from error
    except BrokenPipeError:  # of this command's output
        raise
    except ConnectionError as error:
        raise TrainingError(
            f"the cluster was lost: its head node exited or is unreachable. {RESUME_HINT}"
        ) from error
