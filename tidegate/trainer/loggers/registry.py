"""Creates the loggers named in `run.loggers`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from tidegate.config import Settings
from tidegate.errors import StartError
from tidegate.trainer.loggers.background import BackgroundLogger, Logger


def check_loggers(settings: Settings) -> None:
    """Raises StartError if the package of a logger is not installed."""
    for name in settings.run.loggers:
        if importlib.util.find_spec(name) is None:
            raise StartError(
                f"run.loggers names {name!r}, which is not installed: pip install 'tidegate[{name}]'"
            )


def make_loggers(settings: Settings, report: Callable[[str], None]) -> list[BackgroundLogger]:
    """Create the loggers of the settings; `report` receives messages about failures."""

    def make(name: str) -> BackgroundLogger:
        return BackgroundLogger(name, lambda step: FACTORIES[name](settings, step), report)

    return [make(name) for name in settings.run.loggers]


def _tensorboard(settings: Settings, step: int) -> Logger:
    from tidegate.trainer.loggers.tensorboard import TensorBoard

    return TensorBoard(settings.run_dir, step)


def _wandb(settings: Settings, step: int) -> Logger:
    from tidegate.trainer.loggers.wandb import WeightsAndBiases

    return WeightsAndBiases(settings)


FACTORIES: dict[str, Callable[[Settings, int], Logger]] = {"tensorboard": _tensorboard, "wandb": _wandb}
