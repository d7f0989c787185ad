"""Registry of the services that train and sample in place of the run's own processes.

A service is named here, in its own folder, and in the settings, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidegate.config import Settings
from tidegate.settings.reading import arguments_of
from tidegate.settings.servers import TinkerCommand
from tidegate.settings.tinker import TinkerService
from tidegate.trainer.policy.protocol import TrainedPolicy

CurrentWeights = Callable[[], tuple[Path, int]]
"""Returns the directory and the number of the current version."""


def load_policy(settings: Settings) -> TrainedPolicy | None:
    """Open the policy at the service of `trainer.backend`; None if this trainer is to hold it."""
    if settings.trainer.backend == "own":
        return None
    from tidegate.tinker.policy import TinkerPolicy
    from tidegate.tinker.service import service_key

    trainer = settings.trainer
    return TinkerPolicy(
        trainer, settings.model.path.absolute(), settings.run.seed, service_key(trainer.tinker)
    )


def engine_command(settings: Settings, current: CurrentWeights) -> list[str]:
    """Return the command and arguments of an engine at the service, with the current weights."""
    weights, version = current()
    service = {name: getattr(settings.trainer.tinker, name) for name in TinkerService.model_fields}
    command = TinkerCommand.model_validate({"model": {"path": weights}, "tinker": service})
    return ["tinker", *arguments_of(command), "--weight-version", str(version)]


def engine_secrets(settings: Settings) -> dict[str, str | None]:
    """Return what a process that samples at the service needs, beside its own key: that of the service."""
    from tidegate.tinker.service import service_key

    return {"service_key": service_key(settings.trainer.tinker)}
