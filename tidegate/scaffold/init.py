"""Creates a project that can be trained at once: agent, environment, settings, test, small base model."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from tidegate.errors import ConfigError

HERE = Path(__file__).parent
TINY_BASE = HERE / "tiny_base"
"""The bundled base model; in a checkout it is a link to `examples/tiny_base/model`."""
FILES = ("agent.py", "env.py", "config.toml", "test_project.py")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def make_project(name: str, where: Path) -> Path:
    """Creates the directory `where/name` atomically, with a copy of the base model, so that it can be moved.

    Raises ConfigError if the name is invalid, the directory exists, or it cannot be written.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} is not a name for a project: use a letter, then letters, digits, '-' and '_', at most "
            "64 characters"
        )
    project = where / name
    if os.path.lexists(project):
        raise ConfigError(f"{project} already exists; choose another name")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=where) as folder:
            partial = Path(folder, name)
            _fill(partial, name)
            partial.rename(project)
    except OSError as error:
        raise ConfigError(f"{project} cannot be created: {error.strerror or error}") from error
    return project


def _fill(folder: Path, name: str) -> None:
    folder.mkdir()
    for file in FILES:
        text = (HERE / "project" / f"{file}.tmpl").read_text(encoding="utf-8")
        if file == "config.toml":
            text = text.replace("{name}", name)
        (folder / file).write_text(text, encoding="utf-8")
    (folder / ".gitignore").write_text("runs/\n__pycache__/\n", encoding="utf-8")
    shutil.copytree(TINY_BASE, folder / "model")
