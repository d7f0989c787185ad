"""docs/troubleshooting.md: the tests that it names exist, and its table has every finding of the doctor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import REPO

TEXT = (REPO / "docs" / "troubleshooting.md").read_text()
FAILURES = TEXT.partition("## Fifteen ways RL runs go wrong")[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_the_named_tests_exist() -> None:
    documents = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]
    named = {match for path in documents for match in NAMED.findall(path.read_text())}
    assert len(named) > 30
    assert [f"{file}::{name}" for file, name in sorted(named) if not _has_test(REPO / file, name)] == []


def _has_test(path: Path, name: str) -> bool:
    return path.exists() and re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE) is not None


def test_there_are_fifteen_failures_each_with_a_symptom_an_answer_and_a_test() -> None:
    sections = re.split(r"^### ", FAILURES, flags=re.MULTILINE)[1:]
    assert [section.partition(".")[0] for section in sections] == [str(number) for number in range(1, 16)]
    for section in sections:
        parts = re.findall(r"^\*\*(.*?)\*\*", section, re.MULTILINE)
        assert parts == ["Symptom.", "In Tidegate.", "Tests."]
        assert "https://github.com/" in section.partition("**In Tidegate.**")[0]
        assert NAMED.search(section.partition("**Tests.**")[2])


def codes() -> Iterator[tuple[str, str]]:
    """Yields the level and the code of each finding that the doctor makes, unless its code is a variable."""
    for path in (REPO / "tidegate" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                made = node.func.id in ("error", "warning", "note", "Finding")
                words = [arg.value for arg in node.args[1:3] if isinstance(arg, ast.Constant)]
                if made and words:
                    yield node.func.id, words[0]


def test_the_table_of_the_doctor_has_its_errors_and_warnings() -> None:
    table = TEXT.partition("## Findings of the doctor")[2].partition("## Fifteen")[0]
    named = {code for line in table.splitlines() if line.startswith("| ") for code in _last_cell(line)}
    source = "".join(path.read_text() for path in (REPO / "tidegate" / "doctor").glob("*.py"))
    assert [code for code in sorted(named) if f'"{code}"' not in source] == []
    assert {code for level, code in codes() if level not in ("note", "ok")} - named - {"ok"} == set()


def _last_cell(line: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", line.strip("|").rpartition("|")[2])
