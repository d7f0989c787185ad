"""A browser, and the dashboard of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import chromium
from tests.e2e.dashboard.pages import viewed
from tests.unit.viewer.dashboard_run import write_dashboard_run


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with chromium.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("browser")
    with viewed(write_dashboard_run(scratch / "run").dir, scratch) as found:
        yield found
