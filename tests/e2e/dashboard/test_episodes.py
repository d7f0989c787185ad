"""Groups, episodes and tokens in the dashboard: output, tools, keyboard, escaping of model output."""

from __future__ import annotations

import json

import pytest

from tests.e2e import chromium
from tests.e2e.dashboard.pages import HASH, TIP, clean
from tests.unit.viewer.dashboard_run import EVIL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here"),
]


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


async def test_a_group_that_became_stale_before_a_batch_can_be_opened(port: int, url: str) -> None:
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/episodes?kind=stale")
        await page.until("document.querySelectorAll('main tbody tr').length === 8")
        rows = await page.look(
            "[...document.querySelectorAll('main tbody tr a')].map(one => one.textContent)"
        )
        assert (rows[0], rows[-2]) == ("step 3 · g3-old · slot 0", "before a batch · g3-late · slot 0")
        await page.press(*("j" * 7), "Enter")
        await page.until("document.querySelector('h1')?.textContent.startsWith('Slot 0')")
        assert await page.look(HASH) == "#/stale/group/g3-late/episode/0"
        await page.press("]")
        await page.until("document.querySelector('h1')?.textContent.startsWith('Slot 1')")
        await page.press("u")
        await page.until("document.querySelectorAll('.member').length === 2")
        why = await page.look("document.querySelector('.why-dropped').textContent")
        assert why.startswith("The group became stale before the trainer fetched it for a batch")
        await page.press("u")
        await page.until("document.querySelector('h1')?.textContent === 'Episodes'")
        clean(page, url)


async def test_the_output_stands_beside_the_gold_answer(port: int, url: str) -> None:
    tops = "[...document.querySelector('.result').children].map(one => one.getBoundingClientRect().top)"
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/step/2/group/g2-good/episode/0")
        await page.until("document.querySelector('.result')")
        output, gold = await page.look(tops)
        assert output == gold
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


async def test_a_group_tells_why_it_was_not_trained_on(port: int, url: str) -> None:
    why = "document.querySelector('.why-dropped')?.textContent"
    async with chromium.page(port) as page:
        await page.open(f"{url}/#/step/1/group/g1-alike")
        await page.until(why)
        assert (await page.look(why)).startswith("All 2 rewards are 1.000: ")
        await page.open(f"{url}/#/step/1/group/g1-old")
        await page.until(f"{why}?.includes('trainer.max_staleness')")
        said = await page.look(why)
        assert said.startswith("The group was dropped while the batch of step 1 was assembled: ")
        assert "more than the bound of 2" in said
        assert "; g2-good replaced it." in said
        facts = "[...document.querySelectorAll('.facts dt')].map(one => one.textContent)"
        assert {"bound", "became stale"} <= set(await page.look(facts))
        await page.press("u")
        await page.until("document.querySelector('main a[href=\"#/episodes?kind=stale\"]')")
        await page.open(f"{url}/#/step/1/group/g1-good")
        assert not await page.look(why)
        clean(page, url)


async def test_episodes_are_found_by_their_reward_and_their_prompt(port: int, url: str) -> None:
    rows = "[...document.querySelectorAll('main tbody tr a')].map(one => one.textContent)"
    async with chromium.page(port) as page:
        await page.open(f"{url}/")
        await page.press("g", "a")
        await page.until(f"{rows}.length === 20")
        await page.look("document.querySelector('[name=low]').focus()")
        await page.press("1", "Enter")
        await page.until(f"{rows}.length === 13")
        assert await page.look("location.hash") == "#/episodes?low=1"
        await page.look("document.querySelector('[name=state]').value = 'stale'")
        await page.look("document.querySelector('[name=text]').focus()")
        await page.press(*"3 + 4?", "Enter")
        await page.until(f"{rows}.length === 4")
        assert (await page.look(rows))[0] == "step 3 · g3-old · slot 1"
        assert EVIL in await page.look("document.querySelector('main tbody .prompt').textContent")
        assert "4 episodes found among 20" in await page.look("document.querySelector('.found').textContent")
        await page.press("Escape")
        await page.look("document.activeElement.blur()")
        await page.press("j", "Enter")
        await page.until("document.querySelector('h1')?.textContent.startsWith('Slot 1')")
        await page.open(f"{url}/#/tasks")
        await page.until("document.querySelector('main tbody')")
        assert await page.look("window.pwned === undefined")
        clean(page, url)
