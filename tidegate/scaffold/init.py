"""Creates a project that can be trained: agent, environment, settings and test."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from tidegate.errors import ConfigError
from tidegate.scaffold.example_files import EXAMPLES, TINY_BASE, copy_example

HERE = Path(__file__).parent
MODEL = "smollm2"
"""Directory of a project's language model, which `tidegate convert` writes."""
FILES = ("agent.py", "env.py", "config.toml", "warm-up.jsonl", "test_project.py")
"""Files of a project whose model is a language model; all but the test are those of the example `words`."""
TINY_FILES = ("agent.py", "env.py", "config.toml", "test_project.py")
STATEFUL_FILES = ("env.py", "config.toml", "test_project.py")
"""Files of a project with a stateful environment, whose agent is the built-in `chat`."""
DATA_FILES: tuple[str, ...] = ("config.toml",)
"""Files of a project for a data file, which uses a built-in environment and agent."""
_FILES = {"tiny": TINY_FILES, "stateful": STATEFUL_FILES}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def make_project(
    name: str,
    where: Path,
    kind: Literal["words", "tiny", "stateful"] = "words",
    sections: str | None = None,
    example: str | None = None,
) -> Path:
    """Creates the directory `where/name` atomically. All but a project of the kind `words` contain a copy of
    the tiny base model.

    Args:
        name: Name of the project.
        where: Directory in which it is created.
        kind: `words` has the agent and the environment of the example `words`, and needs a language model;
            `tiny` has an agent with a calculator, and `stateful` an environment with a state and tools.
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
                _fill(partial, name, kind, sections)
            else:
                partial.mkdir()
                copy_example(example, partial)
            partial.rename(project)
    except OSError as error:
        raise ConfigError(f"{project} cannot be created: {error.strerror or error}") from error
    return project


def _fill(folder: Path, name: str, kind: str, sections: str | None) -> None:
    folder.mkdir()
    ignored = "runs/\n__pycache__/\n"
    if sections is None and kind == "words":
        _fill_with_words(folder, name)
        ignored += f"{MODEL}/\n"
    else:
        kind, files = ("data", DATA_FILES) if sections is not None else (kind, _FILES[kind])
        for file in files:
            text = (HERE / kind / f"{file}.tmpl").read_text(encoding="utf-8")
            if file == "config.toml":
                text = text.replace("{name}", name).replace("{sections}", sections or "")
            (folder / file).write_text(text, encoding="utf-8")
        shutil.copytree(TINY_BASE, folder / "model")
    (folder / ".gitignore").write_text(ignored, encoding="utf-8")


def _fill_with_words(folder: Path, name: str) -> None:
    example = EXAMPLES / "words"
    for file in FILES[:-1]:
        shutil.copyfile(example / file, folder / file)
    shutil.copyfile(HERE / "words" / f"{FILES[-1]}.tmpl", folder / FILES[-1])
    settings = (example / "config.toml").read_text(encoding="utf-8")
    settings = settings.replace('name = "words"', f'name = "{name}"').replace("examples/words/", "")
    settings = settings.replace(f"build/{MODEL}", MODEL)
    (folder / "config.toml").write_text(settings, encoding="utf-8")
