"""Which file of the repository becomes which page of the site, and where its links then lead."""

from __future__ import annotations

import os
import re
from pathlib import Path

REPO = Path(__file__).parents[2]
REPOSITORY = "https://github.com/tidegate/tidegate"
OTHER_PAGES = {
    "README.md": "index.md",
    "AGENTS.md": "coding-agents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
}
"""Pages whose sources are outside docs/."""

_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)")


def page_sources() -> dict[str, str]:
    """Returns the source of each page, both as paths: page in the site → file in the repository."""
    pages = {page: source for source, page in OTHER_PAGES.items() if (REPO / source).exists()}
    for path in sorted((REPO / "docs").rglob("*.md")):
        pages[path.relative_to(REPO / "docs").as_posix()] = path.relative_to(REPO).as_posix()
    for path in sorted((REPO / "examples").glob("*/README.md")):
        pages[f"examples/{path.parent.name}.md"] = path.relative_to(REPO).as_posix()
    return pages


def assets() -> list[str]:
    """Returns the files in docs/ that pages show or offer: images and notebooks."""
    kinds = {".png", ".svg", ".ipynb", ".json"}
    found = (path for path in (REPO / "docs").rglob("*") if path.suffix in kinds)
    return sorted(path.relative_to(REPO / "docs").as_posix() for path in found)


def links(text: str) -> list[str]:
    """Returns the targets of a page's links, without those in code blocks."""
    return [target for _, target in _LINK.findall(_FENCE.sub("", text))]


def title(source: str) -> str:
    """Returns the first heading of a page."""
    return (REPO / source).read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0]


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain).lower().replace(" ", "-")
        number = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def rewritten(text: str, source: str, page: str, pages: dict[str, str]) -> str:
    """Returns a page's text with links that lead to pages of the site, or else to the repository.

    A link whose text is the name of a page's file gets the page's title.

    Args:
        text: Text of the source.
        source: Path of the source in the repository.
        page: Path of the page in the site.
        pages: `page_sources()`.
    """
    page_of = {origin: target for target, origin in pages.items()}

    def link(match: re.Match[str]) -> str:
        label = match[1]
        path, mark, anchor = match[2].partition("#")
        if "://" in path or path.startswith("mailto:") or not path:
            return match[0]
        name = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if label.endswith(".md") and name in page_of:
            label = title(name)
        return f"[{label}]({_address(name, page, page_of)}{mark}{anchor}"

    def prose(part: str) -> str:
        # The site's Markdown nests by four spaces, where GitHub's needs two.
        return re.sub(r"^ {2,3}(?=\S)", "    ", _LINK.sub(link, part), flags=re.MULTILINE)

    parts = []
    end = 0
    for fence in _FENCE.finditer(text):
        parts += [prose(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, prose(text[end:])])


def _address(name: str, page: str, page_of: dict[str, str]) -> str:
    """Returns the link from a page to a file or folder of the repository."""
    for origin in (name, f"{name}/README.md"):
        if origin in page_of:
            return os.path.relpath(page_of[origin], os.path.dirname(page))
    if name.startswith("docs/") and name.removeprefix("docs/") in assets():
        return os.path.relpath(name.removeprefix("docs/"), os.path.dirname(page))
    if not (REPO / name).exists():
        raise FileNotFoundError(f"{page} links to {name}, which does not exist")
    kind = "tree" if (REPO / name).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{name}"
