"""Pages of a run in the dashboard, and several runs compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import chromium
from tests.e2e.dashboard.pages import clean, viewed
from tests.unit.viewer.dashboard_run import EVIL, write_dashboard_run, write_step
from tests.unit.viewer.service_run import write_service_run
from tests.unit.viewer.test_processes import write_load
from tests.unit.viewer.test_timeline import write_timed_run
from tests.unit.viewer.viewer_run import write_run
from tidegate.trainer.ledger.entries import State, entry
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.types import Group, Outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here"),
]


async def test_the_overview_has_its_charts(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        titles = await page.look("[...document.querySelectorAll('figure h3')].map(one => one.textContent)")
        assert titles[:5] == [
            "Reward",
            "Staleness",
            "Waiting times",
            "Tokens per second",
            "Groups by state",
        ]
        assert {"Entropy", "Lag KL", "Mismatch KL"} <= set(titles)
        heights = (
            "[...document.querySelectorAll('figure > svg')].map(one => one.getBoundingClientRect().height)"
        )
        await page.until(f"Math.min(...{heights}) > 60")
        assert "bound" in await page.look(
            "document.querySelector('[data-title=Staleness] .legend').textContent"
        )
        assert await page.look("document.getElementById('status').textContent.includes('step 3 of 4')")
        clean(page, url)


async def test_a_problem_before_and_after(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/evaluations")
        await page.until("document.querySelector('[data-row]')")
        cells = "[...document.querySelector('main table').querySelectorAll('.number')]"
        assert "0.000\n0.000 to 0.561" in await page.look(f"{cells}.map(one => one.innerText)")
        assert "Wilson score interval" in await page.look("document.querySelector('main > p').textContent")
        await page.press("j", "Enter")
        await page.until("document.querySelectorAll('.member').length === 2")
        heads = await page.look(
            "[...document.querySelectorAll('.member header')].map(one => one.textContent)"
        )
        assert heads == ["Step 0reward 0", "Step 3reward 1"]
        clean(page, url)


async def test_a_service_has_a_page_with_its_clients_texts_as_texts(port: int, tmp_path: Path) -> None:
    run = write_service_run(tmp_path / "run")
    with viewed(run.dir, tmp_path) as url:
        async with chromium.page(port) as page:
            await page.open(f"{url}/")
            await page.until("document.querySelector('a[href=\"#/service\"]').getClientRects().length")
            await page.press("g", "v")
            await page.until("document.querySelectorAll('.note').length === 2")
            texts = await page.look("document.querySelector('main').textContent")
            for text in (
                EVIL,
                f"unkind {EVIL}",
                f"better {EVIL}",
                "Version 2 is in test",
                "No publish waits now",
            ):
                assert text in texts
            assert await page.look("window.pwned === undefined && !document.querySelector('main img')")
            assert await page.look("document.querySelector('svg.bounds').getBoundingClientRect().width") > 200
            for width in (1400, 700, 400):
                await page.width(width)
                assert await page.look("document.documentElement.scrollWidth - innerWidth") <= 0, width
            late = run.conversation("shop.late", 1.0)
            run.take(late)
            await page.until("document.querySelector('main tfoot').textContent.includes('all keys6')")
            await page.look("document.querySelectorAll('.note a')[1].click()")
            await page.until("document.querySelector('.flow')")
            clean(page, url)


async def test_a_run_without_clients_has_no_such_page(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        assert not await page.look("document.querySelector('a[href=\"#/service\"]').getClientRects().length")


CURVES = "[...document.querySelectorAll('.curves figure')].map(one => one.dataset.title)"


async def test_any_metric_is_found_by_name_and_its_curve_stays_in_the_address(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        await page.press("g", "m")
        await page.until(f"{CURVES}.length === 3")
        assert await page.look(CURVES) == ["reward/mean", "eval/reward", "entropy"]
        tops = "[...document.querySelectorAll('.curves figure')].slice(0, 2).map(one => one.offsetTop)"
        assert len(set(await page.look(tops))) == 1
        groups = "[...document.querySelectorAll('.chooser details')].map(one => one.dataset.group)"
        assert await page.look(groups) == sorted(await page.look(groups))
        assert {"reward", "eval", "time"} <= set(await page.look(groups))
        await page.look("document.querySelector('.search').focus()")
        await page.press(*"wait")
        shown = "[...document.querySelectorAll('.metric:not([hidden])')].map(one => one.dataset.key)"
        assert await page.look(shown) == ["time/wait_for_batch"]
        await page.look("document.querySelector('.metric:not([hidden]) input').click()")
        await page.until(f"{CURVES}.includes('time/wait_for_batch')")
        await page.look("document.querySelector('input[name=\"x axis\"][value=tokens]').click()")
        title = "document.querySelector('.curves [data-title=\"reward/mean\"] text.title.end')?.textContent"
        await page.until(f"{title} === 'sampled tokens'")
        chosen = await page.look("location.href")
        await page.open(f"{url}/#/steps")
        await page.open(chosen)
        await page.until(f"{CURVES}.length === 4")
        await page.until(f"{title} === 'sampled tokens'")
        await page.look("document.querySelector('.chooser button').click()")
        await page.until(f"{CURVES}.length === 0")
        clean(page, url)


async def test_a_column_of_the_distributions_leads_to_the_histograms_of_its_step(port: int, url: str) -> None:
    titles = "[...document.querySelectorAll('.distribution')].map(one => one.dataset.title)"
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        await page.press("g", "d")
        await page.until("document.querySelectorAll('[data-title=Reward] .cell').length === 6")
        assert await page.look(titles) == ["Reward", "Length", "Staleness", "Advantage"]
        await page.width(420)
        await page.until("document.querySelector('.distribution > svg').clientWidth < 420")
        cell = "document.querySelector('[data-title=Reward] [data-step=\"2\"]')"
        assert "mean 0.6667" in await page.look(f"{cell}.textContent")
        await page.look(f"{cell}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
        await page.until("document.querySelector('h1')?.textContent === 'Step 2'")
        await page.until("document.querySelectorAll('.four [data-title=Reward] .cell').length === 2")
        clean(page, url)


async def test_the_load_of_processes_leads_to_their_logs(port: int, tmp_path: Path) -> None:
    run_dir = write_dashboard_run(tmp_path / "run").dir
    write_load(run_dir)
    with viewed(run_dir, tmp_path) as url:
        async with chromium.page(port) as page:
            await page.open(f"{url}/")
            await page.press("g", "p")
            await page.until("document.querySelectorAll('figure > svg').length === 2")
            rows = "[...document.querySelectorAll('main tbody tr')].map(one => one.innerText)"
            assert (await page.look(rows))[0] == "trainer\t–\t0.50\t1.25\t1.50\t1 GB\t2 GB\t1"
            await page.width(420)
            assert await page.look("document.documentElement.scrollWidth - innerWidth") <= 0
            await page.press("j", "Enter")
            await page.until("document.querySelector('h1')?.textContent === 'Log of engine'")
            await page.until("document.querySelector('pre.log').textContent.startsWith('line 0')")
            assert EVIL in await page.look("document.querySelector('pre.log').textContent")
            assert await page.look("window.pwned === undefined")
            clean(page, url)


async def test_a_failed_run_gives_its_reason_and_the_groups_that_were_dropped(
    port: int, tmp_path: Path
) -> None:
    run = write_dashboard_run(tmp_path / "run")
    alike = [run.simple("g4-alike", slot, 1.0) for slot in range(2)]
    run.files.drop(Group("g4-alike", "t", alike), State.FILTERED, 4)
    run.ledger.record(entry("run", "ended", step=3, version=3, status="failed", why="no engine responds"))
    with viewed(run.dir, tmp_path) as url:
        async with chromium.page(port) as page:
            await page.open(f"{url}/")
            await page.until("document.querySelector('.light.failed')")
            banner = "document.querySelector('.banner.bad').textContent"
            assert await page.look(banner) == "The run failed after step 3: no engine responds"
            await page.open(f"{url}/#/episodes?state=filtered")
            assert "step 4 · g4-alike" in await page.look("document.querySelector('tbody a').textContent")
            await page.open(f"{url}/#/step/4")
            said = await page.look("document.querySelector('main').textContent")
            assert "This step has not been taken." in said
            assert "g4-alike" in said
            clean(page, url)


async def test_older_failures_are_loaded_from_the_parts_before(port: int, tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    files = TrajectoryFiles(run.dir, part_bytes=30_000)
    for number in range(120):
        lost = run.simple("late", number, None, outcome=Outcome.TIMEOUT)
        files.append([lost], State.FAILED)
    assert (run.dir / "trajectories" / "failed.3.jsonl").exists()
    with viewed(run.dir, tmp_path) as url:
        async with chromium.page(port) as page:
            rows = "[...document.querySelectorAll('tbody a')].map(one => one.textContent)"
            await page.open(f"{url}/#/failures")
            assert await page.look(rows) == [f"late.{number}.1" for number in range(119, 19, -1)]
            await page.look("document.querySelector('button.more').click()")
            await page.until("document.querySelectorAll('tbody a').length === 121")
            assert (await page.look(rows))[-2:] == ["late.0.1", "g1-lost.0.1"]
            assert await page.look("document.querySelector('button.more')") is None
            await page.look("[...document.querySelectorAll('tbody a')][0].click()")
            await page.until("document.querySelector('h1')?.textContent.includes('late')")
            clean(page, url)


async def every_colour_has_one_meaning(page: chromium.Page) -> None:
    """The legend names each colour that the timeline has, in light and dark."""
    names = "[...document.querySelectorAll('.timeline .legend li')].map(one => one.textContent)"
    fills = (
        "[...document.querySelectorAll('.timeline svg > rect, .timeline svg a rect')]"
        ".map(one => getComputedStyle(one).fill)"
    )
    blocks = (
        "[...document.querySelectorAll('.timeline .legend i.block')]"
        ".map(one => getComputedStyle(one).backgroundColor)"
    )
    for theme in ("light", "dark"):
        await page.look(f"document.documentElement.style.colorScheme = '{theme}'")
        said = await page.look(names)
        assert {"wait for groups", "update", "publish", "publish of a version", "between calls"} <= set(said)
        assert any(name.startswith("version ") for name in said)
        colours = await page.look(blocks)
        assert len(set(colours)) == len(colours)
        assert set(await page.look(fills)) <= set(colours)
    await page.look("document.documentElement.style.colorScheme = ''")


async def test_the_timeline_leads_to_its_episodes_and_to_the_steps_beside(port: int, tmp_path: Path) -> None:
    with viewed(write_timed_run(tmp_path / "run").dir, tmp_path) as url:
        async with chromium.page(port) as page:
            await page.open(f"{url}/#/timeline?step=2&span=1")
            assert await page.look("document.querySelector('h1').textContent") == "Step 2"
            await page.until("document.querySelectorAll('.timeline a.lane').length === 2")
            widths = (
                "[...document.querySelectorAll('.timeline svg > rect')].map(one => one.width.baseVal.value)"
            )
            wait, update, publish, evaluation = await page.look(widths)
            assert wait / publish == pytest.approx(4, rel=0.01)
            assert update / evaluation == pytest.approx(1.5, rel=0.01)
            await every_colour_has_one_meaning(page)
            charts = "[...document.querySelectorAll('figure[data-title]')].map(one => one.dataset.title)"
            assert await page.look(charts) == [
                "Episodes in a call, by version of the engine's policy",
                "Finished groups that wait for the trainer",
            ]
            await page.width(420)
            await page.until("document.querySelector('.timeline > svg').clientWidth < 420")
            assert await page.look("document.documentElement.scrollWidth - innerWidth") <= 0
            await page.press("]")
            await page.until("document.querySelector('h1')?.textContent === 'Step 3'")
            await page.press("[")
            await page.until(
                "document.querySelector('h1')?.textContent === 'Step 2' && document.querySelector('a.lane')"
            )
            await page.look("location.hash = document.querySelector('a.lane').getAttribute('href')")
            await page.until("document.querySelector('h1')?.textContent.startsWith('Slot 0')")
            await page.open(f"{url}/#/timeline?step=9")
            await page.until(
                "document.querySelector('[role=alert]')?.textContent.includes('no times of step 9')"
            )
            page.errors = [one for one in page.errors if "404" not in one]
            clean(page, url)


async def test_several_runs_are_compared_on_one_page(port: int, tmp_path: Path) -> None:
    one, two = write_dashboard_run(tmp_path / "one"), write_run(tmp_path / "two", steps=40)
    (tmp_path / "two" / "config.toml").write_text(
        (one.dir / "config.toml").read_text().replace("max_staleness = 2", f'max_staleness = "{EVIL}"')
    )
    with viewed(one.dir, tmp_path, two) as url:
        async with chromium.page(port) as page:
            await page.open(f"{url}/")
            assert await page.look("document.querySelector('h1').textContent") == "2 runs"
            await page.until("document.querySelectorAll('.curves figure > svg').length > 2")
            legend = "document.querySelector('[data-title=\"reward/mean\"] .legend').textContent"
            assert await page.look(legend) == "onetwo"
            lines = "document.querySelectorAll('[data-title=\"reward/mean\"] polyline:not(.faint)')"
            colours = f"[...{lines}].map(one => getComputedStyle(one).stroke)"
            assert len(set(await page.look(colours))) == 2
            cells = "[...document.querySelectorAll('#differences tbody tr')].map(one => one.innerText)"
            assert await page.look(cells) == [f"trainer.max_staleness\t2\t{EVIL}"]
            assert await page.look("window.pwned === undefined")
            finals = "[...document.querySelectorAll('#finals tbody tr')].map(one => one.innerText)"
            assert "steps\t3 of 4\t40 of 4" in await page.look(finals)
            # A run is hidden; the charts are drawn without it, and the address remembers it.
            await page.look("document.querySelectorAll('.chips.runs input')[1].click()")
            await page.until(f"{legend} === 'one'")
            assert (await page.look("location.hash")).endswith("hide=1")
            for width in (1400, 420):
                await page.width(width)
                assert await page.look("document.documentElement.scrollWidth - innerWidth") <= 0
            # A new step of a run that goes on is drawn without a reload.
            await page.look("window.stayed = true")
            write_step(one, 4)
            await page.until(f"{finals}.some(text => text.startsWith('steps\t4 of 4'))")
            chart = "document.querySelector('[data-title=\"reward/mean\"]').dataset.chart"
            await page.until(f"/\\[4(\\.0)?,/.test({chart})")
            assert await page.look("window.stayed")
            # To one run's own pages, and back.
            await page.look("document.querySelector('#finals thead a').click()")
            await page.until("location.pathname === '/run/0/' && document.querySelector('#content h1')")
            await page.press("g", "s")
            await page.until("document.querySelectorAll('main tbody tr').length === 4")
            await page.look("document.querySelector('.top .all').click()")
            await page.until(
                "location.pathname === '/' && document.querySelector('h1')?.innerText === '2 runs'"
            )
            clean(page, url)
