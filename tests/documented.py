"""The keys of `metrics.jsonl` documented in docs/metrics.md, and when they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


def documented() -> dict[str, str]:
    """Key → when it is written; `<name>` in a key stands for any text."""
    found: dict[str, str] = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            for key in re.findall(r"`([^`]+)`", cells[0]):
                assert key not in found, f"{key} is explained twice"
                found[key] = cells[2]
    return found


def unexplained(keys: Iterable[str]) -> set[str]:
    """The keys that the page does not document."""
    patterns = [re.escape(key).replace("<", "").replace(">", "") for key in documented() if "<" not in key]
    patterns += [re.sub(r"<\w+>", r"[^/]+", key) for key in documented() if "<" in key]
    return {key for key in keys if not any(re.fullmatch(one, key) for one in patterns)}
