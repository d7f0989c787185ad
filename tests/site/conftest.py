"""The built site at a loopback address."""

from __future__ import annotations

import functools
import http.server
import threading
import tomllib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import REPO

SITE = REPO / "build" / "site" / "html"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serves the site at the path of its address on the web: 404.html has links from the root."""
    assert (SITE / "index.html").exists(), "the site is not built: run make docs"
    path = urlsplit(tomllib.loads((REPO / "zensical.toml").read_text())["project"]["site_url"]).path.strip(
        "/"
    )
    root = tmp_path_factory.mktemp("web")
    (root / path).symlink_to(SITE)
    handler = functools.partial(Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{path}"
        finally:
            server.shutdown()
