"""The embedded engine is held against SGLang, request by request: the same calls, shapes and spans.

Every test runs against both. Where they are known to differ, the difference is stated in the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from tests.integration.engine_http import Client

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
LONG = 400
META = {
    "id": str, "finish_reason": dict, "prompt_tokens": int, "completion_tokens": int, "cached_tokens": int,
    "weight_version": str, "weight_versions": list, "output_token_logprobs": list, "e2e_latency": float,
}  # fmt: skip


async def load(engine: Client, weights: Path, version: int) -> None:
    body = {"model_path": str(weights), "weight_version": str(version), "abort_all_requests": False}
    status, answer = await engine.post("/update_weights_from_disk", {**body, "flush_cache": True})
    assert status == 200, answer
    assert answer["success"]


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def fresh(engine: Client, versions: list[Path]) -> None:
    """Version 0 is live, and nothing is paused."""
    await engine.post("/pause_generation", {"mode": "retract"})
    await load(engine, versions[0], 0)
    await engine.post("/continue_generation", {})


def recomputed(weights: Path, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    found: list[float] = logprobs[torch.arange(len(output)), output].tolist()
    return found


async def test_a_replys_fields_have_these_names_and_types(engine: Client) -> None:
    reply = await engine.generate([1, 2, 3], rid="mine", max_new_tokens=5, ignore_eos=True)
    meta = reply["meta_info"]
    assert {name: type(meta[name]) for name in META} == META
    assert len(reply["output_ids"]) == meta["completion_tokens"] == 5
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert [one[1] for one in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
async def test_logprobs_are_of_the_temperature_scaled_distribution(
    engine: Client, versions: list[Path], temperature: float
) -> None:
    reply = await engine.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=temperature)
    said = [one[0] for one in reply["meta_info"]["output_token_logprobs"]]
    assert said == pytest.approx(
        recomputed(versions[0], [1, 2, 3], reply["output_ids"], temperature), abs=1e-4
    )


async def test_greedy_ids_are_the_models_own(engine: Client, versions: list[Path]) -> None:
    reply = await engine.generate([5, 6, 7], max_new_tokens=30, ignore_eos=True, temperature=0)
    model = AutoModelForCausalLM.from_pretrained(versions[0], dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, *reply["output_ids"]]])
    with torch.no_grad():
        best = model(ids).logits[0, 2:-1].argmax(-1).tolist()
    assert reply["output_ids"] == best


async def test_a_streams_events_are_cumulative(engine: Client) -> None:
    events = [event async for event in engine.stream([1, 2, 3], max_new_tokens=60, ignore_eos=True)]
    assert len(events) > 3
    for earlier, later in itertools.pairwise(events):
        count = len(earlier["output_ids"])
        assert later["output_ids"][:count] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
        assert earlier["meta_info"]["weight_version"] == "0"
        assert len(earlier["meta_info"]["output_token_logprobs"]) == count
    last = events[-1]["meta_info"]
    assert last["finish_reason"]["type"] == "length"
    assert last["weight_versions"] == [{"version": "0", "start": 0, "end": 60}]


async def test_a_stop_id_ends_and_is_named(engine: Client) -> None:
    sampled = await engine.generate([9, 8], max_new_tokens=20, ignore_eos=True, temperature=0)
    stop = sampled["output_ids"][7]
    reply = await engine.generate([9, 8], max_new_tokens=20, temperature=0, stop_token_ids=[stop])
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == sampled["output_ids"][: sampled["output_ids"].index(stop) + 1]


async def test_a_repeated_prefix_is_taken_from_the_cache(engine: Client) -> None:
    prompt = [7 + n % 500 for n in range(64)]
    first = await engine.generate(prompt, max_new_tokens=2, ignore_eos=True)
    again = await engine.generate([*prompt, 3, 4], max_new_tokens=2, ignore_eos=True)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] >= 63


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


async def test_pause_aborts_by_default(engine: Client) -> None:
    events = []
    async for event in engine.stream([1, 2], max_new_tokens=LONG, ignore_eos=True):
        events.append(event)
        if len(events) == 2:
            await engine.post("/pause_generation", {})
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(events[-1]["output_ids"]) < LONG
    await engine.post("/continue_generation", {})


async def test_abort_matches_by_prefix(engine: Client) -> None:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        kinds = {"max_new_tokens": LONG, "ignore_eos": True}
        # SGLang hears only of ids that are live themselves, and then ends all that begin so.
        rids = ("job-1", "job-12")
        ended = [group.create_task(engine.generate([1, 3], rid=rid, **kinds)) for rid in rids]
        other = group.create_task(engine.generate([1, 4], rid="other", **kinds))
        stream = engine.stream([9, 9], rid="watch", **kinds)
        await anext(stream)  # by now the earlier ones are in
        async with engine.http.post(engine.url + "/abort_request", json={"rid": "job-1"}) as answer:
            assert answer.status == 200  # SGLang's has no body
        async for _ in stream:
            pass
    assert [task.result()["meta_info"]["finish_reason"]["type"] for task in ended] == ["abort", "abort"]
    assert other.result()["meta_info"]["finish_reason"]["type"] == "length"


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


async def test_a_json_schema_is_followed(engine: Client) -> None:
    properties = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    reply = await engine.generate([1, 2], max_new_tokens=60, json_schema=json.dumps(schema))
    assert "".join(reply["text"].split()) in ('{"a":true}', '{"a":false}')
