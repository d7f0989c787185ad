"""Creates the loggers named in `run.loggers`. A name is that of a module here, an extra and a package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial

from tidegate.config import Settings
from tidegate.errors import StartError
from tidegate.program import advise_extra
from tidegate.service.tracing import check_tracing
from tidegate.trainer.loggers.background import BackgroundLogger, Logger


def check_loggers(settings: Settings) -> None:
    """Raises StartError if the package of a logger is not installed."""
    for name in settings.run.loggers:
        if name == "opentelemetry":
            check_tracing("run.loggers")
        elif importlib.util.find_spec(name) is None:
            raise StartError(f"run.loggers names {name!r}, which is not installed: {advise_extra(name)}")


def make_loggers(settings: Settings, report: Callable[[str], None]) -> list[BackgroundLogger]:
    """Create the loggers of the settings; `report` receives messages about failures."""

    def make(name: str, step: int) -> Logger:
        module = importlib.import_module(f"tidegate.trainer.loggers.{name}")
        logger: Logger = module.make(settings, step)
        return logger

    return [BackgroundLogger(name, partial(make, name), report) for name in settings.run.loggers]
