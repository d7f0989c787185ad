"""The embedded engine is held against SGLang, request by request: the same calls, shapes and spans.

Every test runs against both. Where they are known to differ, the difference is stated in the test.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engine_contract import LONG, EngineContract, at_the_beginning, recomputed
from tests.integration.engine_http import Client

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


class TestSGLang(EngineContract):
    pass


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def fresh(engine: Client, versions: list[Path]) -> None:
    await at_the_beginning(engine, versions)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_weights_change_under_a_running_request(
    engine: Client, versions: list[Path], mode: str
) -> None:
    """Spans concatenate to the whole, under both versions; in place SGLang needs the cache kept."""
    events: list[Any] = []
    async with asyncio.timeout(120):
        async for event in engine.stream([1, 2, 3], max_new_tokens=LONG, ignore_eos=True):
            events.append(event)
            if len(events) == 3:
                await engine.post("/pause_generation", {"mode": mode})
                body = {
                    "model_path": str(versions[1]),
                    "weight_version": "1",
                    "flush_cache": mode == "retract",
                }
                status, _ = await engine.post(
                    "/update_weights_from_disk", {**body, "abort_all_requests": False}
                )
                assert status == 200
                assert (await engine.info())["weight_version"] == "1"
                await engine.post("/continue_generation", {})
    reply = events[-1]
    spans = reply["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], LONG)
    assert reply["output_ids"][: len(events[2]["output_ids"])] == events[2]["output_ids"]
    if mode == "in_place":
        return  # keys of the old weights remain: no version's logprobs are the recorded ones
    said = [one[0] for one in reply["meta_info"]["output_token_logprobs"]]
    cut = spans[0]["end"]
    for version, part in ((0, slice(0, cut)), (1, slice(cut, LONG))):
        expected = recomputed(versions[version], [1, 2, 3], reply["output_ids"], 1.0)
        assert said[part] == pytest.approx(expected[part], abs=1e-4)


async def test_a_paused_request_waits_and_goes_on_with_the_same_tokens(engine: Client) -> None:
    params = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 0}
    expected = (await engine.generate([4, 4], **params))["output_ids"]
    events = []
    async for event in engine.stream([4, 4], **params):
        events.append(event)
        if len(events) == 3:
            await engine.post("/pause_generation", {"mode": "retract"})
            await engine.post("/continue_generation", {})
    assert events[-1]["output_ids"] == expected


async def test_a_bad_path_is_refused_and_the_weights_stay(engine: Client, tmp_path: Path) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0}
    before = await engine.generate([1, 2, 3], **params)
    body = {"model_path": str(tmp_path / "nowhere"), "weight_version": "7"}
    status, _ = await engine.post("/update_weights_from_disk", body)
    assert status == 400
    assert (await engine.info())["weight_version"] == "0"
    assert (await engine.generate([1, 2, 3], **params))["output_ids"] == before["output_ids"]


@pytest.mark.parametrize(
    "params", [{"temperature": -1}, {"top_p": 0}, {"max_new_tokens": -5}, {"min_p": 1.5}]
)
async def test_sampling_parameters_out_of_range_are_refused(engine: Client, params: dict[str, Any]) -> None:
    status, _ = await engine.post("/generate", {"input_ids": [1, 2], "sampling_params": params})
    assert status == 400
