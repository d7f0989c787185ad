"""Each lesson is a page, its plot and its notebook. `make test-docs` executes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.lessons.pages import FOLDER, lessons, with_outputs, without_results
from docs.site.llms import navigation, project
from docs.site.sources import REPO, links

LARGEST = {".md": 20_000, ".ipynb": 25_000, ".png": 60_000}
"""Bytes of a lesson's files."""
each_lesson = pytest.mark.parametrize("page", lessons(), ids=lambda page: page.stem)


def test_lessons_are_numbered_and_in_the_same_order_everywhere() -> None:
    names = [page.name for page in lessons()]
    assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1))
    assert [link for link in links((FOLDER / "index.md").read_text()) if re.match(r"\d", link)] == names
    pages = [page for _, _, page in navigation(project()["nav"]) if page.startswith("lessons/")]
    assert pages == ["lessons/index.md", *(f"lessons/{name}" for name in names)]


@each_lesson
def test_a_lesson_has_its_files_and_none_is_large(page: Path) -> None:
    sizes = {kind: page.with_suffix(kind).stat().st_size for kind in LARGEST}
    assert {kind: size for kind, size in sizes.items() if size > LARGEST[kind]} == {}


@each_lesson
def test_the_notebook_is_that_of_the_page(page: Path) -> None:
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    assert "\n\n".join(map(as_markdown, cells)) == without_results(page.read_text()).strip()
    assert all(not cell.get("outputs") for cell in cells)


@each_lesson
def test_the_names_in_its_cells_are_defined(page: Path) -> None:
    cells = re.findall(r"^```python\n(?!%%)(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    code = re.sub(r"^[%!].*$", "", "".join(cells), flags=re.MULTILINE)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    checked = subprocess.run(command, input=code, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@each_lesson
def test_the_page_shows_its_notebook_and_its_plot_and_leads_to_its_neighbours(page: Path) -> None:
    found = links(page.read_text())
    order = ["index.md", *(one.name for one in lessons()), "index.md"]
    place = order.index(page.name)
    assert page.with_suffix(".ipynb").name in found
    assert page.with_suffix(".png").name in found
    assert found[-1] == order[place + 1]


@each_lesson
def test_the_page_has_outputs_and_names_no_path_of_a_machine(page: Path) -> None:
    text = page.read_text()
    assert "```\n\n```text\n" in text
    assert re.findall(r"(?<![\w.])/(?:tmp|root|home|work)/\S+", text) == []
    assert str(REPO) not in text


@each_lesson
def test_the_page_asserts_its_result(page: Path) -> None:
    assert re.search(r"^assert ", page.read_text(), re.MULTILINE)


def as_markdown(cell: dict[str, object]) -> str:
    source = "".join(cell["source"])  # type: ignore[arg-type]
    if cell["cell_type"] == "markdown":
        return source
    language = "bash" if source.startswith("%%bash\n") else "python"
    return f"```{language}\n" + source.removeprefix("%%bash\n") + "\n```"


PAGE = """# 0. Page

```bash
tidegate view
```

Text.

```python
1 + 1
```

```text
an old output
```
"""


def test_outputs_are_written_beneath_their_cells_and_replaced() -> None:
    once = with_outputs(PAGE, ["served", "2"])
    assert "view\n```\n\n```text\nserved\n```\n\nText." in once
    assert once.endswith("1 + 1\n```\n\n```text\n2\n```\n")
    assert with_outputs(once, ["other", "2"]) == once.replace("served", "other")
    assert without_results(once) == without_results(PAGE)
    assert "served" not in without_results(once)


def test_a_block_between_texts_is_no_output() -> None:
    text = "```python\nx\n```\n\nText.\n\n```text\ndrawing\n```\n"
    assert without_results(text) == text


def test_the_plot_is_a_result() -> None:
    assert without_results("A.\n\n![Reward](01-x.png)\n\nB.\n") == "A.\n\nB.\n"
