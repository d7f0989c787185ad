"""What the documents name is there: files, links, verbs and their flags, settings, make's targets."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import REPO
from tidegate.cli import _parser
from tidegate.config import Settings
from tidegate.settings.sections import known_keys

DOCUMENTS = sorted(
    [
        *REPO.glob("*.md"),
        *REPO.glob("docs/*.md"),
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


def verb_of(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """The parser of a verb, or of one of its actions; fails where there is none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words:
            assert words[0] in action.choices, f"there is no verb {words[0]!r}"
            return verb_of(action.choices[words[0]], words[1:])
    return parser


@cache
def settings() -> set[str]:
    return {key for key, _, _ in known_keys(Settings)}


def is_setting(name: str) -> bool:
    return (
        name in settings()
        or any(key.startswith(f"{name}.") for key in settings())
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
def test_verbs_flags_and_settings_are_there(path: Path) -> None:
    for line in code(path.read_text()):
        for command in re.findall(r"(?:^|[ /])tidegate ([a-z][^|;#&]*)", line):
            words = command.split()
            verb = verb_of(_parser(), words)
            for flag in re.findall(r"(?<![\w-])--([\w.-]+)", command):
                known = f"--{flag}" in verb._option_string_actions
                setting = verb.get_default("takes_settings") and is_setting(flag)
                assert known or setting, f"tidegate {words[0]} has no --{flag}"
        for name in re.findall(
            r"^(?:run|model|engine|gateway|agent|sampling|trainer|eval)\.(?!p[yt]$)[a-z_]+$", line
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
