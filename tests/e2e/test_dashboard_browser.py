"""The dashboard in a real browser: rendering, keyboard access, escaping of model output, live updates."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import chromium
from tests.e2e.chromium import Page
from tests.unit.viewer.dashboard_run import EVIL, write_dashboard_run, write_step
from tests.unit.viewer.service_run import write_service_run
from tests.unit.viewer.test_processes import write_load
from tests.unit.viewer.test_timeline import write_timed_run
from tests.unit.viewer.viewer_run import write_run
from tests.waiting import announced
from tidegate.trainer.ledger.entries import entry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here"),
]

HASH = "decodeURIComponent(location.hash)"
TIP = "document.getElementById('tooltip')"


@contextlib.contextmanager
def viewed(run_dir: Path, scratch: Path, *others: Path) -> Iterator[str]:
    """Serves a run, or several; yields the URL."""
    address = scratch / f"{run_dir.name}.address"
    runs = [str(path) for path in (run_dir, *others)]
    command = [sys.executable, "-m", "tidegate", "view", *runs, "--port", "0", "--owned",
               "--announce", str(address)]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield announced(address, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with chromium.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("browser")
    with viewed(write_dashboard_run(scratch / "run").dir, scratch) as found:
        yield found


def clean(page: Page, url: str) -> None:
    assert page.errors == []
    strangers = [one for one in page.asked if not one.startswith(url)]
    assert strangers == []


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


async def test_an_episode_shows_its_output_the_gold_answer_and_the_reward_parts(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/step/2/group/g2-good/episode/0")
        await page.until("document.querySelector('.result')")
        rows = "[...document.querySelectorAll('.result .message')].map(one => one.textContent)"
        assert await page.look(rows) == ["returned#### 7", f"gold answer7 {EVIL}"]
        facts = "[...document.querySelectorAll('.facts > div')].slice(0, 2).map(one => one.textContent)"
        reward, parts = await page.look(facts)
        assert reward.startswith("reward0")
        assert parts.startswith("reward partsexact_answer 0")
        await page.open(f"{url}/#/step/2/group/g2-good")
        await page.until("document.querySelectorAll('.member').length === 2")
        assert (await page.look("document.querySelector('main').textContent")).count("gold answer") == 1
        clean(page, url)


async def test_calls_of_tools_stand_in_the_timeline(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/step/2/group/g2-good/episode/1")
        await page.until("document.querySelector('.turn.tool')")
        blocks = "[...document.querySelectorAll('.turns > section')].map(one => one.id || one.textContent)"
        look, turn, add, *_ = await page.look(blocks)
        assert look == f'look({{"at": "{EVIL}"}})tool error0.500 sThere is no {EVIL}.'
        assert (turn, add) == ("turn-0", 'add({"left": 3, "right": 4})0.125 s7')
        await page.press("m")
        await page.until(
            "document.querySelectorAll('.message').length && document.querySelector('.turn.tool')"
        )
        clean(page, url)


async def test_from_the_overview_to_a_token_by_keys_alone(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        await page.press("g", "s")
        await page.until("document.querySelectorAll('main tbody tr').length === 3")
        await page.press("j", "j", "Enter")
        await page.until("document.querySelector('h1')?.textContent === 'Step 2'")
        await page.until("document.querySelector('[data-row]')")
        await page.press("j", "Enter")
        await page.until("document.querySelectorAll('.member').length === 2")
        await page.press("j", "j", "Enter")
        await page.until("document.querySelector('h1')?.textContent.startsWith('Slot 1')")
        await page.press("x")
        await page.until(f"!{TIP}.hidden")
        assert await page.look(HASH) == "#/step/2/group/g2-good/episode/1/turn/0/token/0"
        assert "changed by a grammar" not in await page.look(f"{TIP}.textContent")
        assert "a grammar excluded ids" in await page.look(f"{TIP}.textContent")
        await page.press("ArrowRight")
        told = await page.look(f"{TIP}.textContent")
        assert "trained" in told
        assert "logprob−0.5000" in told
        assert "probability60.7%" in told
        assert "version1" in told
        assert "advantage+0.707" in told
        assert await page.look("document.getElementById('spoken').textContent.startsWith('token: 2 of 6')")
        await page.press("End")
        assert (await page.look(HASH)).endswith("/turn/3/token/4")
        await page.press("ArrowUp")
        assert (await page.look(HASH)).count("/turn/3/given/") == 1
        await page.press("[")
        await page.until("document.querySelector('h1')?.textContent.startsWith('Slot 0')")
        await page.press("u")
        await page.until("document.querySelectorAll('.member').length === 2")
        await page.press("u")
        await page.until("document.querySelector('h1')?.textContent === 'Step 2'")
        await page.press("]")
        await page.until("document.querySelector('h1')?.textContent === 'Step 3'")
        await page.press("?")
        assert await page.look("document.getElementById('help').open")
        await page.press("Escape")
        assert not await page.look("document.getElementById('help').open")
        clean(page, url)


async def test_what_models_write_is_text(port: int, url: str) -> None:
    places = ("", "steps", "step/1", "step/1/group/g1-good", "step/1/group/g1-good/episode/0", "failures",
              "step/1/group/g1-good/episode/0?view=messages", "failures/episode/0", "settings",
              "evaluations", "evaluations/task/held_out-1", "eval/3/episode/0", "episodes",
              "tasks", "metrics",
              "step/1/group/%3Cimg%20src%3Dx%20onerror%3D%22window.pwned%3D1%22%3E")  # fmt: skip
    seen = 0
    async with chromium.page(port) as page:
        for place in places:
            await page.open(f"{url}/#/{place}")
            await page.send("Page.reload")
            await page.open(f"{url}/#/{place}")
            seen += await page.look(f"document.body.innerText.includes({json.dumps(EVIL)})")
            assert await page.look("window.pwned === undefined"), place
            assert await page.look("document.querySelectorAll('main script, main img').length") == 0
        assert seen >= 5
        page.errors = [one for one in page.errors if "404" not in one]  # of a group that does not exist
        clean(page, url)


async def test_tokens_are_coloured_by_what_is_chosen(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/step/2/group/g2-good/episode/1")

        async def colours() -> list[str]:
            tokens = "[...document.querySelectorAll('.flow.sampled .tok')]"
            return list(await page.look(f"{tokens}.map(one => one.className.split(' ').pop())"))

        assert set(await colours()) == {"unlikely"}
        await page.press("2")
        assert set(await colours()) == {"v1"}
        await page.press("3")
        assert "up" in await colours()
        await page.press("4")
        assert (await colours())[:8] == ["m-grammar", *["m-trained"] * 4, "m-grammar", *["m-undelivered"] * 2]
        legend = await page.look("document.querySelector('.legend.tokens').textContent")
        assert "trained (13)" in legend
        assert "not delivered (4)" in legend
        assert await page.look("location.hash.endsWith('?by=mask')")
        await page.look("document.querySelectorAll('input[name=sequence]')[2].click()")
        assert (await colours())[:6] == ["m-grammar", *["m-shared"] * 4, "m-grammar"]
        assert await page.look("document.querySelectorAll('.turns > .turn:not(.tool)').length") == 2
        clean(page, url)


async def test_an_address_leads_back_to_the_token(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/step/2/group/g2-good/episode/0/turn/0/token/5?by=version")
        await page.until(f"!{TIP}.hidden")
        told = await page.look(f"{TIP}.textContent")
        assert "token6 of 80, sampled in turn 0" in told
        assert "version2" in told
        assert await page.look("document.querySelector('.chosen').classList.contains('v2')")
        assert "straddles a publish: 1 → 2" in await page.look("document.querySelector('.turn').textContent")
        await page.open(f"{url}/#/step/77")
        assert "has not taken step 77" in await page.look(
            "document.querySelector('[role=alert]').textContent"
        )


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


async def test_a_group_tells_why_it_was_not_trained_on(port: int, url: str) -> None:
    why = "document.querySelector('.why-dropped')?.textContent"
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/step/1/group/g1-alike")
        await page.until(why)
        assert (await page.look(why)).startswith("All 2 rewards are 1.000: ")
        await page.open(f"{url}/#/step/1/group/g1-old")
        await page.until(f"{why}?.includes('trainer.max_staleness')")
        assert "more than the bound of 2" in await page.look(why)
        assert "; g2-good replaced it." in await page.look(why)
        await page.open(f"{url}/#/step/1/group/g1-good")
        assert not await page.look(why)
        clean(page, url)


async def test_episodes_are_found_by_their_reward_and_their_prompt(port: int, url: str) -> None:
    rows = "[...document.querySelectorAll('main tbody tr a')].map(one => one.textContent)"
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        await page.press("g", "a")
        await page.until(f"{rows}.length === 18")
        await page.look("document.querySelector('[name=low]').focus()")
        await page.press("1", "Enter")
        await page.until(f"{rows}.length === 12")
        assert await page.look("location.hash") == "#/episodes?low=1"
        await page.look("document.querySelector('[name=state]').value = 'stale'")
        await page.look("document.querySelector('[name=text]').focus()")
        await page.press(*"3 + 4?", "Enter")
        await page.until(f"{rows}.length === 3")
        assert (await page.look(rows))[0] == "step 3 · g3-old · slot 1"
        assert EVIL in await page.look("document.querySelector('main tbody .prompt').textContent")
        assert "3 episodes found among 18" in await page.look("document.querySelector('.found').textContent")
        await page.press("Escape")
        await page.look("document.activeElement.blur()")
        await page.press("j", "Enter")
        await page.until("document.querySelector('h1')?.textContent.startsWith('Slot 1')")
        await page.open(f"{url}/#/tasks")
        await page.until("document.querySelector('main tbody')")
        assert await page.look("window.pwned === undefined")
        clean(page, url)


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
            await page.until("document.querySelector('a.lane')")
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


async def test_charts_are_drawn_at_their_width_with_titles_of_the_axes(port: int, url: str) -> None:
    """Text in a scaled drawing would be unreadable in a narrow window."""
    scales = """[...document.querySelectorAll('figure > svg')].map(svg =>
        svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"""
    widest = "Math.max(...[...document.querySelectorAll('figure > svg')].map(one => one.clientWidth))"
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        await page.until(f"{widest} > 900")
        assert await page.look(f"{scales}.every(one => Math.abs(one - 1) < 0.01)")
        titles = (
            "[...document.querySelectorAll('[data-title=Staleness] text.title')].map(one => one.textContent)"
        )
        assert await page.look(titles) == ["policy versions", "step"]
        await page.width(400)
        await page.until(f"{widest} < 400")
        assert await page.look(f"{scales}.every(one => Math.abs(one - 1) < 0.01)")
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
