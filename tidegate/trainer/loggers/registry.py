"""The loggers by their names in `run.loggers`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from tidegate.config import Settings
from tidegate.errors import StartError
from tidegate.trainer.loggers.background import BackgroundLogger, Logger


def check_loggers(settings: Settings) -> None:
    """Raises StartError for one whose package, which has its name, is not installed."""
    for name in settings.run.loggers:
        if importlib.util.find_spec(name) is None:
            raise StartError(
                f"run.loggers names {name!r}, which is not installed: pip install 'tidegate[{name}]'"
            )


def loggers_of(settings: Settings, say: Callable[[str], None]) -> list[BackgroundLogger]:
    """Those that the settings name; `say` hears of one that fails."""

    def aside(name: str) -> BackgroundLogger:
        return BackgroundLogger(name, lambda step: MAKERS[name](settings, step), say)

    return [aside(name) for name in settings.run.loggers]


def _tensorboard(settings: Settings, step: int) -> Logger:
    from tidegate.trainer.loggers.tensorboard import TensorBoard

    return TensorBoard(settings.run_dir, step)


def _wandb(settings: Settings, step: int) -> Logger:
    from tidegate.trainer.loggers.wandb import WeightsAndBiases

    return WeightsAndBiases(settings)


MAKERS: dict[str, Callable[[Settings, int], Logger]] = {"tensorboard": _tensorboard, "wandb": _wandb}
