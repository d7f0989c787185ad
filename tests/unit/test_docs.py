"""Files, links, commands, settings and targets that documents name exist; so do names in docstrings."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.lessons.pages import without_results
from tests import REPO
from tidegate.cli import _parser
from tidegate.settings.sections import known_keys

DOCUMENTS = sorted(
    [
        *REPO.glob("*.md"),
        *REPO.glob("docs/*.md"),
        *REPO.glob("docs/lessons/*.md"),
        *REPO.glob("examples/*/*.md"),
        *REPO.glob("benchmarks/*.md"),
    ]
)
ROOMS = "tidegate|tests|examples|benchmarks|docs|requirements"
TARGETS = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))


def code(text: str) -> Iterator[str]:
    """What stands between backticks, lines that go on joined."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def subparser(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """The parser of a command, or of one of its actions; fails where there is none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words:
            assert words[0] in action.choices, f"there is no command {words[0]!r}"
            return subparser(action.choices[words[0]], words[1:])
    return parser


@cache
def settings(model: str) -> set[str]:
    module, _, name = model.partition(":")
    return {key for key, _, _ in known_keys(getattr(importlib.import_module(module), name))}


def is_setting(name: str, model: str = "tidegate.config:Settings") -> bool:
    return (
        name in settings(model)
        or any(key.startswith(f"{name}.") for key in settings(model))
        or name == "section.key"
        or re.match(r"(env|agent)\.options\.", name) is not None
    )


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text())
    assert [one for one in links if "://" not in one and not (path.parent / one).exists()] == []


@each_document
def test_files_that_are_named_are_there(path: Path) -> None:
    said = " ".join(code(path.read_text()))
    named = set(re.findall(rf"(?<![\w./<-])((?:{ROOMS})/[\w./-]*\w)", said))
    assert [one for one in sorted(named) if not (REPO / one).exists()] == []


@each_document
def test_commands_flags_and_settings_exist(path: Path) -> None:
    for line in code(without_results(path.read_text())):
        for command in re.findall(r"(?:^|[ /])tidegate ([a-z][^|;#&]*)", line):
            words = command.split()
            parser = subparser(_parser(), words)
            for flag in re.findall(r"(?<![\w=-])--([\w.-]+)", command):
                known = f"--{flag}" in parser._option_string_actions
                model = parser.get_default("settings_model")
                assert known or (model and is_setting(flag, model)), f"tidegate {words[0]} has no --{flag}"
        for name in re.findall(
            r"^(?:run|model|engine|gateway|agent|sampling|trainer|eval)\.(?!(?:p[yt]|safetensors)$)[a-z_]+$",
            line,
        ):
            assert is_setting(name), f"there is no setting {name}"
        for target in re.findall(r"^make ([a-z-]+)", line):
            assert target in TARGETS, f"there is no target {target!r}"


def test_every_target_explains_itself() -> None:
    told = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout
    assert {line.split("\t")[0] for line in told.splitlines()} == {
        one for one in TARGETS if not one.startswith("-")
    }


FILE_TYPES = {"html", "ids", "json", "jsonl", "offsets", "png", "pt", "toml"}
LIBRARIES = {*sys.stdlib_module_names, "ray", "torch"}


def names_of(path: Path) -> Iterator[str]:
    """Yields the full names of a module, of its functions, classes and variables, and of their members."""
    module = ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
    yield module
    for node in ast.parse(path.read_text()).body:
        owner = module
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield (owner := f"{module}.{node.name}")
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{owner}.{part.name}"
            elif isinstance(part, ast.Attribute | ast.Name) and isinstance(part.ctx, ast.Store):
                yield f"{owner}.{part.attr if isinstance(part, ast.Attribute) else part.id}"


@cache
def name_endings() -> set[str]:
    """Every dotted name of the package, and each of its endings: `b.C` for `a.b.C`."""
    names = [name.split(".") for path in (REPO / "tidegate").rglob("*.py") for name in names_of(path)]
    return {".".join(parts[start:]) for parts in names for start in range(len(parts))}


def test_docstrings_name_existing_code() -> None:
    missing = []
    for path in sorted((REPO / "tidegate").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    names = re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`", text)
                    missing += [(path.name, name) for name in names if not exists(name)]
    assert missing == []


def exists(name: str) -> bool:
    """Whether a dotted name is a file, a setting, a library's or the package's; the last is a logger."""
    if name.rpartition(".")[2] in FILE_TYPES or name.partition(".")[0] in LIBRARIES:
        return True
    return name in name_endings() or is_setting(name) or name == "tidegate.gateway.access"
