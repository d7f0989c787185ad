"""axe-core on every page of the built site and on the dashboard, in light and dark; the keyboard's reach."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests import REPO
from tests.e2e import chromium
from tests.e2e.chromium import Page
from tests.e2e.dashboard.pages import viewed
from tests.site.conftest import SITE
from tests.unit.viewer.dashboard_run import write_dashboard_run

pytestmark = pytest.mark.site
AXE = REPO / ".venvs" / "site-node" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
CHECK = f"""axe.run(document, {{runOnly: {json.dumps(RULES)}, resultTypes: ["violations"]}}).then(found =>
    found.violations.flatMap(rule => rule.nodes.map(node =>
        [rule.id, node.target.join(" "), node.any.concat(node.all, node.none)[0]?.message ?? rule.help])))"""
LOADED = "document.readyState === 'complete'"
CONTENT = "document.querySelector('#content:not([aria-busy]) h1')"
VIEWS = (
    "", "#/metrics", "#/distributions", "#/processes", "#/timeline", "#/tasks", "#/episodes", "#/steps",
    "#/evaluations", "#/failures", "#/settings", "#/steps/1",
)  # fmt: skip
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with chromium.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@contextlib.asynccontextmanager
async def opened(port: int, url: str, scheme: str, ready: str) -> AsyncIterator[Page]:
    async with chromium.page(port) as page:
        await page.prefer(scheme)
        await page.send("Page.navigate", url=url)
        await page.until(f"location.href !== 'about:blank' && {LOADED} && {ready}")
        yield page


async def violations(page: Page) -> list[Any]:
    await page.look(AXE.read_text(encoding="utf-8") + "; 0")
    # A colour in transition has no contrast yet.
    await page.until("document.getAnimations().every(one => one.playState !== 'running')")
    return list(await page.look(CHECK))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
async def test_a_page_of_the_site_has_no_violations(path: str, scheme: str, port: int, site: str) -> None:
    async with opened(port, f"{site}/{path}", scheme, "document.querySelector('h1, .md-content')") as page:
        assert await violations(page) == []


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("dashboard")
    with viewed(write_dashboard_run(scratch / "run").dir, scratch) as url:
        yield url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
async def test_a_view_of_the_dashboard_has_no_violations(
    view: str, scheme: str, port: int, dashboard: str
) -> None:
    async with opened(port, f"{dashboard}/{view}", scheme, CONTENT) as page:
        assert await violations(page) == []


FOCUSED = """(() => {
    const it = document.activeElement;
    const place = ["article", "header", "nav"].find(name => it.closest(name));
    const text = `${it.className} ${it.ariaLabel ?? ""} ${it.textContent.trim().slice(0, 40)}`;
    return [it.tagName, place ?? "", text, it.matches(":focus-visible")];
})()"""


async def test_the_keyboard_reaches_search_navigation_and_content(port: int, site: str) -> None:
    async with opened(port, f"{site}/installation/", "light", "document.querySelector('h1')") as page:
        reached = []
        for _ in range(400):
            await page.press("Tab")
            reached.append(await page.look(FOCUSED))
            if reached[-1][0] == "BODY":
                break
    stops = reached[:-1]
    assert reached[-1][0] == "BODY", "the focus cannot leave the page"
    assert {"article", "nav", "header"} <= {place for _, place, *_ in stops}
    assert any("search" in text.lower() for _, _, text, _ in stops), "Tab does not reach the search"
    assert "skip" in stops[0][2].lower(), "the first stop is not the link to the content"
    assert [stop for stop in stops if not stop[3]] == []
