"""Parts of Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable


def code(text: str) -> str:
    return f"`{text}`" if text.strip() else ""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head)]
    lines.append(tuple("---" for _ in lines[0]))
    lines += [tuple(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
