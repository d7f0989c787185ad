"""Version of the model with which a standing service starts, the same for its engines and its trainer.

The engines serve clients before the first trainer has started. What they sample then can be trained on only
if the trainer uses the same version for these weights.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.service.serve import write_atomically

NAME = "first_version"
"""File in the run directory."""


def set_first_version(run_dir: Path) -> int:
    """Returns the version in the file, which it writes if there is none: 0."""
    version = first_version(run_dir)
    if version is None:
        version = 0
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / NAME, str(version))
    return version


def first_version(run_dir: Path) -> int | None:
    """Returns the version in the file; None if the run's engines are not those of a standing service."""
    try:
        return int((run_dir / NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
