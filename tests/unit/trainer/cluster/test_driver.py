"""The command that drives a run on a cluster, when the cluster is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from tidegate.config import Settings, load_settings
from tidegate.errors import TrainingError
from tidegate.observer import Silent
from tidegate.trainer.cluster import connect, driver


@pytest.fixture
def settings() -> Settings:
    return load_settings(None, ["--model.path=examples/tiny_base/model"])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """A cluster whose calls raise what is put here, by their names."""
    errors: dict[str, BaseException] = {}

    def call(name: str) -> Any:
        def raising(*_: object, **__: object) -> None:
            if name in errors:
                raise errors[name]

        return raising

    @contextlib.contextmanager
    def reserved(*_: object) -> Iterator[SimpleNamespace]:
        handle = SimpleNamespace(about=SimpleNamespace(remote=lambda: None))
        yield SimpleNamespace(create_actor=lambda *_: handle)

    monkeypatch.setattr(driver, "connected", lambda _: contextlib.nullcontext("home"))
    monkeypatch.setattr(driver, "reserved", reserved)
    monkeypatch.setattr(driver, "ray", SimpleNamespace(get=call("get"), kill=call("kill")))
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: "gone" not in errors)
    return errors


def drive(settings: Settings) -> int:
    def make(*_: object) -> Any:
        raise AssertionError("that is called on the cluster")

    return driver.drive("ray://head:10001", settings, make, Silent())


def test_a_head_node_lost_behind_rays_client_gives_one_clear_message(
    settings: Settings, failing: dict[str, BaseException]
) -> None:
    """There nothing is a RayError, and what is to be ended cannot be told so."""
    failing["get"] = ConnectionError("GRPC connection failed: <...>")
    failing["kill"] = ConnectionError("Client is shutting down.")
    with pytest.raises(TrainingError, match=r"^the cluster was lost: .*--resume$"):
        drive(settings)


def test_a_cluster_that_is_gone_is_asked_for_nothing(
    settings: Settings, failing: dict[str, BaseException]
) -> None:
    """Ray would look for another one, and start one where there is none."""
    failing["get"] = ConnectionError("Client is shutting down.")
    failing["gone"] = failing["get"]
    failing["kill"] = AssertionError("joined another cluster")
    with pytest.raises(TrainingError, match=r"^the cluster was lost: "):
        drive(settings)


def test_a_run_whose_actor_died_is_reported(settings: Settings, failing: dict[str, BaseException]) -> None:
    failing["get"] = ActorDiedError()
    with pytest.raises(TrainingError, match=r"^the run was lost: .*--resume$"):
        drive(settings)


def test_a_closed_pipe_is_not_a_lost_cluster(settings: Settings, failing: dict[str, BaseException]) -> None:
    failing["get"] = BrokenPipeError()
    with pytest.raises(BrokenPipeError):
        drive(settings)
