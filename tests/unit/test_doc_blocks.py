"""Code blocks of pages: settings are accepted, Python compiles and its imports resolve, commands exist.

`make test-docs` runs the cheap commands (docs/checks/commands.py). All others need a mark with the reason.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from docs.checks.blocks import PROGRAMS, Block, blocks, blocks_of, runs
from docs.lessons.pages import lessons
from tests import REPO
from tests.unit.test_docs import TARGETS
from tidegate.config import load_settings
from tidegate.errors import ConfigError

BLOCKS = list(blocks())
READERS = {"my_agent", "my_loss", "service", "bridge"}
"""Modules that a page itself has the reader write."""


def of(language: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", found, ids=str)


@of("toml")
def test_settings_are_accepted(block: Block, tmp_path: Path) -> None:
    if not block.reason:
        check_settings(block.text, tmp_path)


@pytest.mark.parametrize("page", lessons(), ids=lambda page: page.stem)
def test_settings_in_the_tables_of_a_lesson_are_accepted(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    for words in re.findall(r"`(--[a-z]+\.[^`]+)`", "\n".join(rows)):
        load_settings(None, ["--model.path=MODEL", *shlex.split(words)])


@of("python")
def test_python_compiles_and_its_imports_resolve(block: Block) -> None:
    assert unresolved(block.text) == []


@of("bash")
def test_commands_exist(block: Block) -> None:
    assert [command for command in block.commands() if not names_something(command)] == []


@of("bash")
def test_commands_are_run_or_have_a_mark(block: Block) -> None:
    left = [command for command in block.commands() if not runs(command)]
    assert block.reason or left == [], "write the reason before the block: <!-- not run: … -->"
    assert left or not block.reason, "every command of the block is run: remove its mark"


def check_settings(text: str, folder: Path) -> None:
    """Raises ConfigError if a run does not accept these settings."""
    (folder / "page.toml").write_text(text)
    load_settings(folder / "page.toml", ["--model.path=MODEL"])


def unresolved(text: str) -> list[str]:
    tree = compile(text, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names if not is_module(name.name)]
        elif isinstance(node, ast.ImportFrom) and not is_module(node.module or ""):
            names.append(node.module or "")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tidegate"):
            module = importlib.import_module(node.module or "")
            names += [f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
    return names


def is_module(name: str) -> bool:
    try:
        return name in READERS or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def names_something(command: str) -> bool:
    """Whether a command's program, script, module or target exists. Flags: test_docs.py."""
    words = re.sub(r"^(?:[A-Z_]+=(?:\"[^\"]*\"|\S*) )+", "", command).split()
    if not words:
        return True
    program = words[0].rpartition("/")[2]
    if words[0].startswith("examples/"):
        return (REPO / words[0]).exists()
    if program == "make":
        return words[1] in TARGETS
    if program.startswith("python") and words[1] == "-m":
        return is_module(words[2])
    if program.startswith("python"):
        return (REPO / words[1]).exists()
    return program in PROGRAMS


def test_faults_are_found(tmp_path: Path) -> None:
    page = (
        "```toml\n[trainer]\nsteeps = 3\n```\n\n<!-- not run: x -->\n```\nmake nothing\ntidegate train\n```\n"
    )
    settings, commands = blocks_of("page.md", page)
    with pytest.raises(ConfigError, match="steeps"):
        check_settings(settings.text, tmp_path)
    assert commands.reason == "x"
    assert [names_something(command) for command in commands.commands()] == [False, True]
    assert unresolved("from tidegate.types import Task, Tusk\nimport nowhere\n") == [
        "tidegate.types.Tusk",
        "nowhere",
    ]


def test_commands_of_a_block_are_joined_and_have_no_comments() -> None:
    (block,) = blocks_of("page.md", "   ```\n   tidegate train \\\n       a.toml   # minutes\n   ```\n")
    assert (block.language, block.commands()) == ("bash", ["tidegate train a.toml"])
    (prompted,) = blocks_of("page.md", "```\n$ tidegate doctor\nno problem found\n```\n")
    assert prompted.commands() == ["tidegate doctor"]


def test_only_cheap_commands_on_existing_files_are_run() -> None:
    assert runs("tidegate train examples/demo/config.toml --dry-run")
    assert runs("tidegate tasks runs/demo")
    assert not runs("tidegate train examples/demo/config.toml")
    assert not runs("tidegate doctor my.toml")
    assert not runs("tidegate keys create me > key")
