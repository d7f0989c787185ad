"""Files about the project: each extra is documented, metadata agree, and issue templates are valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import REPO
from tidegate import __version__

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
TEMPLATES = sorted((REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_installation_page_lists_every_extra() -> None:
    table = (REPO / "docs" / "installation.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`([a-z-]+)`", cell)}
    assert listed == set(PROJECT["optional-dependencies"])


def test_the_package_has_one_version() -> None:
    assert PROJECT["version"] == __version__


def test_the_citation_has_the_version_and_the_licence() -> None:
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "message", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates_have_the_fields_of_forms(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert all({"name", "url", "about"} == link.keys() for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids)) > 0
    assert all(part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"])


def test_links_of_templates_to_the_repository_exist() -> None:
    found = re.findall(r"tidegate/blob/main/(\S+)", "".join(path.read_text() for path in TEMPLATES))
    assert found
    assert [one for one in found if not (REPO / one).exists()] == []
