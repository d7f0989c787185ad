"""Writes llms.txt: every page of the navigation with its first sentence, for language models.

    python -m docs.site.llms

The generator's own llms.txt is a flat list; its Markdown copies of the pages are what this one links.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from docs.site.prepare import PAGES
from docs.site.sources import REPO

CONFIG = REPO / "zensical.toml"
HTML = REPO / "build" / "site" / "html"


def navigation(entries: list[dict[str, Any]], section: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (section, title, page) of the pages of `nav`; the section is that of the top level.

    Entries that lead to a heading of a page are left out.
    """
    for entry in entries:
        for title, target in entry.items():
            if isinstance(target, list):
                yield from navigation(target, section or title)
            elif "#" not in target:
                yield section or title, title, target


def headings(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields (page, anchor) of the entries of `nav` that lead to a heading: `environments/#rewards`."""
    for target in (target for entry in entries for target in entry.values()):
        if isinstance(target, list):
            yield from headings(target)
        elif "#" in target:
            page, _, anchor = target.partition("/#")
            yield f"{page}.md", anchor


def project() -> dict[str, Any]:
    """Returns the settings of the site."""
    return dict(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"])


def first_sentence(text: str) -> str:
    """Returns the first sentence of a page, without links; empty if it begins otherwise."""
    first = text.partition("\n")[2].strip().split("\n\n")[0]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split())).replace("**", "")
    return re.split(r"(?<=[.!?])\s", plain)[0] if re.match(r"[A-Z`]", plain) else ""


def llms_text(site_url: str) -> str:
    """Returns the content of llms.txt of the site at an address."""
    site = project()
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}"]
    heading = ""
    for section, title, page in navigation(site["nav"]):
        if section != heading:
            lines += ["", f"## {section}", ""]
            heading = section
        about = first_sentence((PAGES / page).read_text(encoding="utf-8"))
        address = page if page == "index.md" else f"{page.removesuffix('.md')}/index.md"
        lines.append(f"- [{title}]({site_url}{address})" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HTML / "llms.txt").write_text(llms_text(project()["site_url"]), encoding="utf-8")
