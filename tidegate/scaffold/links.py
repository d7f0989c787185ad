"""Links of a Markdown file that is read outside the repository."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

REPOSITORY = "https://github.com/tidegate/tidegate"
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#|/")


def absolute_links(
    markdown: str, folder: str, version: str, keep: Callable[[str], bool] = lambda _: False
) -> str:
    """Replaces links relative to `folder` by links to the repository at the tag of a version.

    Args:
        markdown: The text.
        folder: Directory of the file, relative to the repository's root.
        version: Version of the package; the tag is `v` and the version.
        keep: Whether a path relative to the repository's root stays a relative link.

    Returns:
        The text with absolute links. Links within the page and code blocks do not change.
    """

    def replace(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if _ABSOLUTE.match(target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if keep(path):
            return match[0]
        kind = "raw" if image else "blob"
        return f"{image}{text}{REPOSITORY}/{kind}/v{version}/{path}{hash_sign}{anchor}"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)
