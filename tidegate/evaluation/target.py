"""What is evaluated: a run, one of its checkpoints, or a model's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import ConfigError
from tidegate.trainer.checkpoint.checkpoint import committed


@dataclass(frozen=True, slots=True)
class Target:
    """The weights, and the run that they are of (None: of none)."""

    weights: Path
    run_dir: Path | None = None

    @property
    def config(self) -> Path | None:
        """The run's own settings."""
        return None if self.run_dir is None else self.run_dir / "config.toml"


def find_target(path: Path) -> Target:
    """A run's newest committed checkpoint, a checkpoint within a run, or a directory with a model.

    Raises ConfigError where there is none of them.
    """
    if path.is_file():
        raise ConfigError(
            f"{path} is a file; name a run, a checkpoint or a model, and give settings with --config {path}"
        )
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such directory; name a run, a checkpoint or a model")
    if (path / "config.json").is_file():
        run_dir = path.absolute().parent.parent
        of_run = path.absolute().parent.name == "checkpoints" and (run_dir / "config.toml").is_file()
        return Target(path, run_dir if of_run else None)
    if (path / "checkpoints").is_dir() and (path / "config.toml").is_file():
        steps = committed(path)
        if not steps:
            raise ConfigError(f"{path} has no committed checkpoint to evaluate; was it trained at all?")
        return Target(steps[max(steps)], path)
    raise ConfigError(
        f"{path.resolve()} is neither a run (config.toml, checkpoints/) nor a model (config.json)"
    )
