"""Copies an example of the repository into a new directory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tidegate import __version__
from tidegate.errors import ConfigError
from tidegate.scaffold.links import absolute_links

HERE = Path(__file__).parent
INSTALLED = HERE / "examples"
"""In an installed package; setup.py copies the repository's examples there."""
EXAMPLES = INSTALLED if INSTALLED.is_dir() else HERE.parents[1] / "examples"
TINY_BASE = HERE / "tiny_base"
"""The bundled base model; in a checkout it is a link to `examples/tiny_base/model`."""
_IGNORED = shutil.ignore_patterns("__pycache__", "runs")


def examples() -> list[str]:
    """Returns the names of the examples, without the directories of their base models."""
    folders = EXAMPLES.iterdir() if EXAMPLES.is_dir() else ()
    return sorted(one.name for one in folders if one.is_dir() and not _only_a_model(one))


def copy_example(name: str, where: Path) -> list[str]:
    """Copies an example and the folders that it uses to `where/examples`, so that its commands hold there.

    Args:
        name: Name of the example, one of `examples()`.
        where: Existing directory, which gets the folder `examples`.

    Returns:
        The copied directories, relative to `where`.

    Raises:
        ConfigError: There is no example of this name.
    """
    known = examples()
    if name not in known:
        raise ConfigError(f"there is no example {name!r}; examples: {', '.join(known) or 'none'}")
    folders = [name, *sorted(_used_by(EXAMPLES / name) - {name})]
    for folder in folders:
        shutil.copytree(EXAMPLES / folder, where / "examples" / folder, ignore=_IGNORED)
        if folder == "tiny_base" and not (where / "examples" / folder / "model").exists():
            shutil.copytree(TINY_BASE, where / "examples" / folder / "model")
    for script in EXAMPLES.glob("*.sh"):
        shutil.copy2(script, where / "examples")
    for page in where.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        folder = page.parent.relative_to(where).as_posix()
        linked = absolute_links(text, folder, __version__, lambda path: (where / path).exists())
        page.write_text(linked, encoding="utf-8")
    return [f"examples/{folder}" for folder in folders]


def _only_a_model(folder: Path) -> bool:
    return folder.name in ("bases", "__pycache__") or folder.name.endswith(("_base", "_teacher"))


def _used_by(folder: Path) -> set[str]:
    """The folders of `examples/` that its settings and programs name or import."""
    return {found for file in _programs(folder) for found in _named(file) if (EXAMPLES / found).is_dir()}


def _programs(folder: Path) -> Iterator[Path]:
    return (file for pattern in ("*.toml", "*.py", "*.sh") for file in folder.glob(pattern))


def _named(file: Path) -> set[str]:
    return set(re.findall(r"\bexamples[/.](\w+)", file.read_text(encoding="utf-8")))
