"""The documentation site has every page in its navigation, and links lead to headings that exist."""

from __future__ import annotations

import json
import re
from os.path import normpath
from pathlib import Path

import pytest

from docs.site.llms import first_sentence, headings, navigation, project
from docs.site.reference import MODELS, PYTHON_API, settings_page
from docs.site.release import configuration, list_versions
from docs.site.sources import anchors, assets, links, page_sources, rewritten
from tests import REPO
from tidegate.settings.sections import known_keys

PAGES = page_sources()
GENERATED = {f"reference/{name}.md" for name in ("settings", "commands", "http", "python")}
each_page = pytest.mark.parametrize("page", PAGES)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [page for _, _, page in navigation(project()["nav"])]
    assert sorted(pages) == sorted({*PAGES, *GENERATED})


def test_entries_for_headings_lead_to_headings_that_exist() -> None:
    found = list(headings(project()["nav"]))
    assert ("environments.md", "rewards") in found
    missing = [
        (page, anchor) for page, anchor in found if anchor not in anchors((REPO / PAGES[page]).read_text())
    ]
    assert missing == []


@each_page
def test_anchors_exist(page: str) -> None:
    source = REPO / PAGES[page]
    missing = []
    for link in links(source.read_text()):
        path, _, anchor = link.partition("#")
        target = source.parent / path if path else source
        if anchor and "://" not in link and anchor not in anchors(target.read_text()):
            missing.append(link)
    assert missing == []


@each_page
def test_links_inside_the_site_lead_to_its_files(page: str) -> None:
    text = rewritten((REPO / PAGES[page]).read_text(), PAGES[page], page, PAGES)
    paths = {link.partition("#")[0] for link in links(text) if "://" not in link} - {""}
    inside = {normpath(Path(page).parent / path) for path in paths}
    assert inside <= {*PAGES, *assets()}


def test_links_of_a_source_are_rewritten_outside_of_code() -> None:
    text = (
        "# A\n\n[docs/gateway.md](docs/gateway.md#limits), [the\nloop](tidegate/trainer/loop.py), "
        "[demo](examples/demo),\n[search](examples/demo_search)\n"
        "```\n[docs/gateway.md](docs/gateway.md)\n```\n- a\n  - b\n"
    )
    assert rewritten(text, "README.md", "index.md", PAGES) == (
        "# A\n\n[Gateway](gateway.md#limits), "
        "[the\nloop](https://github.com/tidegate/tidegate/blob/main/tidegate/trainer/loop.py), "
        "[demo](https://github.com/tidegate/tidegate/tree/main/examples/demo),\n"
        "[search](examples/demo_search.md)\n```\n[docs/gateway.md](docs/gateway.md)\n```\n- a\n    - b\n"
    )


def test_a_link_to_nothing_ends_the_build() -> None:
    with pytest.raises(FileNotFoundError, match="links to docs/none"):
        rewritten("[x](docs/none.md)", "README.md", "index.md", PAGES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("## Journal and crash recovery", {"journal-and-crash-recovery"}),
        ("## `kill -9`: what *remains* & why", {"kill--9-what-remains--why"}),
        ("## Limits\n## Limits\n```\n# no heading\n```", {"limits", "limits-1"}),
    ],
)
def test_anchors_are_those_of_github(text: str, found: set[str]) -> None:
    assert anchors(text) == found


def test_the_first_sentence_of_a_page_has_no_markup() -> None:
    assert first_sentence("# A\n\n**Bold** text with\na [link](x.md). More.\n") == "Bold text with a link."
    assert first_sentence("# A\n\n## B\n\nText.\n") == ""


def test_the_settings_page_has_every_setting() -> None:
    text = settings_page()
    for model in MODELS.values():
        module, _, name = model.partition(":")
        keys = known_keys(getattr(__import__(module, fromlist=[name]), name))
        assert [key for key, _, _ in keys if f"| `{key}` |" not in text] == []


def test_modules_of_the_python_api_exist_and_have_docstrings() -> None:
    for module in (module for modules in PYTHON_API.values() for module in modules):
        path = REPO / (module.replace(".", "/") + ".py")
        assert re.match(r'"""\w', path.read_text())


def test_versions_of_the_documentation_are_listed_newest_first(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0", "0.11.0rc1"):
        (tmp_path / version).mkdir()
    assert list_versions(tmp_path) == ["0.11.0rc1", "0.10.0", "0.9.0"]
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert {one["version"]: one["aliases"] for one in listed} == {
        "0.11.0rc1": [], "0.10.0": ["latest"], "0.9.0": [],
    }  # fmt: skip
    assert 'href="0.10.0/"' in (tmp_path / "index.html").read_text()
    (tmp_path / "old").mkdir()
    with pytest.raises(SystemExit, match="'old' is not a version, such as"):
        list_versions(tmp_path)


def test_the_site_of_a_version_has_the_menu_and_its_own_address() -> None:
    version = configuration("0.2.0")["project"]
    assert version["site_url"] == project()["site_url"] + "0.2.0/"
    assert version["extra"]["version"]["provider"] == "mike"
    assert version["site_dir"] == "versions/0.2.0"
    assert version["nav"] == project()["nav"]
