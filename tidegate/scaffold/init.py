"""Creates a project that can be trained at once: agent, environment, settings, test, small base model."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from tidegate.errors import ConfigError
from tidegate.scaffold.examples import TINY_BASE, copy_example

HERE = Path(__file__).parent
FILES = ("agent.py", "env.py", "config.toml", "test_project.py")
STATEFUL_FILES = ("env.py", "config.toml", "test_project.py")
"""Files of a project with a stateful environment, whose agent is the built-in `chat`."""
DATA_FILES: tuple[str, ...] = ("config.toml",)
"""Files of a project for a data file, which uses a built-in environment and agent."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def make_project(
    name: str, where: Path, stateful: bool = False, sections: str | None = None, example: str | None = None
) -> Path:
    """Creates the directory `where/name` atomically, with a copy of the base model, so that it can be moved.

    Args:
        name: Name of the project.
        where: Directory in which it is created.
        stateful: Whether its environment has a state and tools.
        sections: Settings `[agent]` and `[env]` of a project that has neither an agent nor an environment
            of its own.
        example: Name of an example; the directory gets it alone, at its path in the repository.

    Raises:
        ConfigError: There is no such example, the name is invalid, the directory exists, or it cannot be
            written.
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
            if example is None:
                _fill(partial, name, stateful, sections)
            else:
                partial.mkdir()
                copy_example(example, partial)
            partial.rename(project)
    except OSError as error:
        raise ConfigError(f"{project} cannot be created: {error.strerror or error}") from error
    return project


def _fill(folder: Path, name: str, stateful: bool, sections: str | None) -> None:
    folder.mkdir()
    files: tuple[str, ...] = STATEFUL_FILES if stateful else FILES
    kind = "stateful" if stateful else "project"
    if sections is not None:
        kind, files = "data", DATA_FILES
    for file in files:
        text = (HERE / kind / f"{file}.tmpl").read_text(encoding="utf-8")
        if file == "config.toml":
            text = text.replace("{name}", name).replace("{sections}", sections or "")
        (folder / file).write_text(text, encoding="utf-8")
    (folder / ".gitignore").write_text("runs/\n__pycache__/\n", encoding="utf-8")
    shutil.copytree(TINY_BASE, folder / "model")
