"""Writes the pages of the site to build/site/pages, from which `make docs` builds it.

python -m docs.site.prepare
"""

from __future__ import annotations

import shutil
from pathlib import Path

from docs.site.fields import with_fields
from docs.site.reference import reference_pages, write
from docs.site.sources import REPO, assets, page_sources, rewritten

PAGES = REPO / "build" / "site" / "pages"


def prepare(folder: Path = PAGES) -> None:
    """Replaces a folder by the site's pages and images."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = page_sources()
    texts = {
        page: rewritten(with_fields((REPO / source).read_text(encoding="utf-8")), source, page, pages)
        for page, source in pages.items()
    }
    write(folder, texts | reference_pages())
    for name in assets():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPO / "docs" / name, folder / name)
    for name in ("extra.css", "extra.js"):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)


if __name__ == "__main__":
    prepare()
