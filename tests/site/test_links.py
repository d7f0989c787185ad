"""LinkChecker on the built site: each link, image and script inside the site exists.

Anchors are checked by the strict build and by tests/unit/test_site.py: LinkChecker reads a page again for
each.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import REPO

pytestmark = pytest.mark.site
CHECKER = REPO / ".venvs" / "site" / "bin" / "linkchecker"
SETTINGS = """
[checking]
maxrequestspersecond=1000
threads=4
[filtering]
checkextern=0
"""


def test_links_of_the_site_lead_somewhere(site: str, tmp_path: Path) -> None:
    settings = tmp_path / "linkchecker.ini"
    settings.write_text(SETTINGS)
    command = [CHECKER, "--no-status", "--no-robots", "--config", settings, f"{site}/index.html"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    checked = re.search(r"(\d+) links in", done.stdout)
    assert checked is not None
    assert int(checked[1]) > 200
