"""The dashboard in narrow windows, light and dark, and during a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import chromium
from tests.e2e.dashboard.pages import clean, viewed
from tests.unit.viewer.dashboard_run import write_dashboard_run, write_step
from tidegate.trainer.ledger.entries import entry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here"),
]


async def test_charts_are_drawn_at_their_width_with_titles_of_the_axes(port: int, url: str) -> None:
    """Text in a scaled drawing would be unreadable in a narrow window."""
    scales = """[...document.querySelectorAll('figure > svg')].map(svg =>
        svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"""
    widest = "Math.max(...[...document.querySelectorAll('figure > svg')].map(one => one.clientWidth))"
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        await page.until(f"{widest} > 900 && {scales}.every(one => Math.abs(one - 1) < 0.01)")
        titles = (
            "[...document.querySelectorAll('[data-title=Staleness] text.title')].map(one => one.textContent)"
        )
        assert await page.look(titles) == ["policy versions", "step"]
        await page.width(400)
        # The browser resizes a chart before the page draws it again.
        await page.until(f"{widest} < 400 && {scales}.every(one => Math.abs(one - 1) < 0.01)")
        clean(page, url)


@pytest.mark.parametrize("width", [700, 400])
async def test_it_fits_narrow_windows(port: int, url: str, width: int) -> None:
    async with chromium.page(port) as page:
        await page.width(width)
        group = "step/1/group/g1-good"
        for place in (
            "",
            "metrics",
            "distributions",
            "timeline",
            "tasks",
            "episodes",
            "steps",
            "step/1",
            group,
            f"{group}/episode/1",
            "failures",
            "processes",
            "settings",
            "evaluations",
        ):
            await page.open(f"{url}/#/{place}")
            await page.until("!document.querySelector('main[aria-busy]')")
            over = await page.look("document.documentElement.scrollWidth - innerWidth")
            assert over <= 0, place


async def test_light_and_dark(port: int, url: str) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    async with chromium.page(port) as page:
        await page.prefer("light")
        await page.open(f"{url}/#/settings")
        light = await page.look(paper)
        await page.prefer("dark")
        dark = await page.look(paper)
        assert (light, dark) == ("rgb(250, 250, 247)", "rgb(16, 22, 26)")
        await page.press("t")
        assert await page.look(paper) == light
        await page.press("t")
        await page.prefer("light")
        assert await page.look(paper) == dark
        await page.press("t")
        assert await page.look(paper) == light


async def test_a_running_run_updates_live(port: int, tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    with viewed(run.dir, tmp_path) as url:
        async with chromium.page(port) as page:
            await page.open(f"{url}/#/steps")
            await page.until("document.querySelectorAll('main tbody tr').length === 3")
            await page.look("window.stayed = true")
            write_step(run, 4)
            await page.until("document.querySelectorAll('main tbody tr').length === 4")
            assert await page.look("document.querySelector('main tbody tr a').textContent") == "4"
            await page.until("document.getElementById('status').textContent.includes('step 4 of 4')")
            await page.press("g", "o")
            await page.until("document.querySelector('[data-title=Staleness]')")
            newest = "document.querySelector('[data-title=Staleness]')?.dataset.chart.includes('[5.0,')"
            assert not await page.look(newest)
            write_step(run, 5)
            run.ledger.record(entry("run", "ended", step=5, version=5))
            await page.until(newest)
            await page.until("document.querySelector('.light.ended')")
            assert await page.look("window.stayed")
            clean(page, url)


async def test_the_page_reports_that_its_server_is_gone(port: int, tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    async with chromium.page(port) as page:
        with viewed(run.dir, tmp_path) as url:
            await page.open(f"{url}/#/steps")
        await page.until("document.querySelector('.light.lost')")
        await page.press("g", "o")
        await page.until("document.querySelector('[role=alert]')?.textContent.includes('tidegate view')")
