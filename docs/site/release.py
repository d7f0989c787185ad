"""Builds the site of one version beside those of other versions, with a menu of the versions.

    python -m docs.site.release VERSION ZENSICAL

The result, build/site/versions, is the root of the web site: a directory for each version,
`versions.json` for the generator's menu, and a page that leads to the newest version.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from packaging.version import InvalidVersion, Version

from docs.site.llms import CONFIG, llms_text
from docs.site.prepare import PAGES, prepare
from docs.site.sources import REPO

SITE = PAGES.parent
VERSIONS = SITE / "versions"
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Tidegate</title>
<meta http-equiv="refresh" content="0; url={version}/">
<a href="{version}/">Tidegate {version}</a>
"""


def configuration(version: str) -> dict[str, Any]:
    """Returns the generator's settings for a version, with paths relative to build/site."""
    settings = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    project = settings["project"]
    project["site_url"] += f"{version}/"
    project["docs_dir"] = PAGES.name
    project["site_dir"] = f"{VERSIONS.name}/{version}"
    project.setdefault("extra", {})["version"] = {"provider": "mike"}
    project["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(REPO)]
    return settings


def list_versions(folder: Path) -> list[str]:
    """Writes `versions.json` and the page that leads to the newest version; final versions precede others.

    Returns:
        The versions that have a directory, newest first.
    """
    found = sorted((_version(one) for one in folder.iterdir() if one.is_dir()), reverse=True)
    newest = next((one for one in found if not one.is_prerelease), found[0])
    entries = [
        {"version": str(one), "title": str(one), "aliases": ["latest"] if one == newest else []}
        for one in found
    ]
    (folder / "versions.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(REDIRECT.format(version=newest), encoding="utf-8")
    return [str(one) for one in found]


def _version(path: Path) -> Version:
    try:
        return Version(path.name)
    except InvalidVersion:
        raise SystemExit(f"{path}: {path.name!r} is not a version, such as 0.2.0") from None


def main(version: str, zensical: str) -> None:
    """Builds the site of a version; a warning of the generator ends the build."""
    version = str(_version(VERSIONS / version))
    prepare()
    config = SITE / "zensical.toml"
    config.write_text(tomli_w.dumps(configuration(version)), encoding="utf-8")
    subprocess.run([zensical, "build", "--clean", "--strict", "--config-file", str(config)], check=True)
    address = configuration(version)["project"]["site_url"]
    (VERSIONS / version / "llms.txt").write_text(llms_text(address), encoding="utf-8")
    print(f"{VERSIONS.relative_to(REPO)}: versions {', '.join(list_versions(VERSIONS))}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
