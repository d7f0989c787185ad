"""docs/formats.md documents what a run writes: fields, tables, files."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

import pytest

from docs.site.fields import field_rows, with_fields
from tests import REPO
from tidegate.gateway.journal import schema
from tidegate.trainer.ledger.entries import LedgerEntry

PAGE = (REPO / "docs" / "formats.md").read_text(encoding="utf-8")
MARKS = re.findall(r"<!-- fields: ([\w.]+):(\w+) -->", PAGE)


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("module", "name"), MARKS, ids=[name for _, name in MARKS])
def test_each_field_of_a_type_has_a_meaning(module: str, name: str) -> None:
    assert len(field_rows(module, name)) > 5


def test_the_tables_replace_the_marks() -> None:
    text = with_fields(PAGE)
    assert "<!--" not in text
    assert "| `output_ids` | `list[int]` | Sampled ids; shape [output]. |" in text
    assert "* group issued:" in text


def test_the_ledger_has_no_other_fields() -> None:
    rows = field_rows("tidegate.trainer.ledger.entries", "LedgerEntry")
    assert [name.strip("`") for name, *_ in rows] == list(LedgerEntry.__annotations__)


def test_each_column_of_the_journal_is_documented() -> None:
    journal = section("Journal")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", journal, re.MULTILINE))
    with sqlite3.connect(":memory:") as database:
        database.executescript(schema.TABLES)
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns: dict[str, list[Any]] = {
            table: [row[1] for row in database.execute(f"PRAGMA table_info({table})")] for table in tables
        }
    database.close()
    assert rows.keys() == columns.keys()
    for table, names in columns.items():
        assert [name for name in names if f"`{name}`" not in rows[table]] == [], table
