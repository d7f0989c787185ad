"""A lesson's page, and the notebook that belongs to it.

The page is the source: its fenced blocks `python` and `bash` are the notebook's cells. Blocks `text` that
follow a cell, and the image of the page's plot, are results of the cells: the notebook does not have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent

_CELL = re.compile(r"^```(?:python|bash)\n.*?^```$", re.DOTALL | re.MULTILINE)
_OUTPUT = re.compile(r"(?<=^```)\n\n```text\n.*?^```$", re.DOTALL | re.MULTILINE)
_PLOT = re.compile(r"^!\[[^\]]*\]\(\d\d-[\w-]+\.png\)\n\n?", re.MULTILINE)


def lessons() -> list[Path]:
    """Returns the pages of the lessons, in their order."""
    return sorted(FOLDER.glob("[0-9][0-9]-*.md"))


def without_results(text: str) -> str:
    """Returns a page's text without outputs and plot: the text of its notebook."""
    return _PLOT.sub("", _cut_outputs(text))


def with_outputs(text: str, outputs: Sequence[str]) -> str:
    """Returns a page's text with new outputs beneath its cells.

    Args:
        text: Text of the page.
        outputs: What each cell printed; nothing is written beneath a cell whose output is empty.
    """
    parts, end = [], 0
    text = _cut_outputs(text)
    for cell, output in zip(_CELL.finditer(text), outputs, strict=True):
        parts.append(text[end : cell.end()])
        end = cell.end()
        if output:
            parts.append(f"\n\n```text\n{output}\n```")
    return "".join([*parts, text[end:]])


def _cut_outputs(text: str) -> str:
    return "".join(_without_output(text))


def _without_output(text: str) -> Iterator[str]:
    end = 0
    for cell in _CELL.finditer(text):
        yield text[end : cell.end()]
        output = _OUTPUT.match(text, cell.end())
        end = output.end() if output else cell.end()
    yield text[end:]
