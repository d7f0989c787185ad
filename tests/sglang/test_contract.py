"""The embedded engine compared with SGLang, request by request: the same calls, shapes and spans.

Every test runs against both. Where they are known to differ, the difference is stated in the test.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from tests.engine_contract import LONG, EngineContract, at_the_beginning, recomputed
from tests.integration.engine.engine_http import Client
from tests.waiting import eventually
from tidegate.gateway.engines.engine import Affinity, EngineRecord, PoolOptions
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult
from tidegate.trainer.publish.broadcast import WeightBroadcaster
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.weights.process_group import buckets

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


def buckets_of(weights: Path) -> Callable[[int], Generator[dict[str, torch.Tensor], None, None]]:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    parameters = dict(model.named_parameters())

    def source(most_bytes: int) -> Generator[dict[str, torch.Tensor], None, None]:
        for names in buckets(parameters, most_bytes):
            yield {name: parameters[name].detach() for name in names}

    return source


async def test_weights_are_sent_under_a_running_request(engine: Client, versions: list[Path]) -> None:
    """Over a process group, in several buckets; every token is of the version that its span names.

    SGLang is first compared with files.
    """
    notes: list[str] = []
    sources = [buckets_of(versions[0]), buckets_of(versions[1])]
    sender = WeightBroadcaster(lambda size: sources[0](size), notes.append, bucket_bytes=100_000)
    control, events = EngineControl(engine.url, engine.http), []
    if not await sender.send([control], 0):
        await control.load(versions[0], 0)
    sources.pop(0)
    async with asyncio.timeout(120):
        async for event in engine.stream([1, 2, 3], max_new_tokens=LONG, ignore_eos=True):
            events.append(event)
            if len(events) == 3:
                assert await sender.send([control], 1) == {engine.url}, notes
    sender.close()
    meta = events[-1]["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["0", "1"]
    cut, said = meta["weight_versions"][0]["end"], [one[0] for one in meta["output_token_logprobs"]]
    for version, part in ((0, slice(0, cut)), (1, slice(cut, LONG))):
        expected = recomputed(versions[version], [1, 2, 3], events[-1]["output_ids"], 1.0)
        assert said[part] == pytest.approx(expected[part], abs=1e-4)


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
async def test_weights_are_sent_to_a_busy_engine_as_to_an_idle_one(
    engine: Client, versions: list[Path]
) -> None:
    """Three publishes during four replies of 2,000 tokens take at most three times as long as without them,
    and every token is of the version that its span names."""
    notes: list[str] = []
    sources, version = [buckets_of(one) for one in versions], 0
    control = EngineControl(engine.url, engine.http)
    sender = WeightBroadcaster(lambda size: sources[version % 2](size), notes.append)
    params = {"max_new_tokens": 2000, "ignore_eos": True}

    async def publish() -> float:
        nonlocal version
        version += 1
        began = time.perf_counter()
        assert await sender.send([control], version) == {engine.url}, notes
        return time.perf_counter() - began

    if not await sender.send([control], 0):
        await control.load(versions[0], 0)
    await publish()
    idle = [await publish() for _ in range(3)]
    busy = []
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate([1, 2, number], **params)) for number in range(4)]
        for _ in range(3):
            await engine.generate([5], max_new_tokens=50, ignore_eos=True)  # all of them have advanced
            busy.append(await publish())
        assert not any(task.done() for task in tasks), "the case proves too little"
    sender.close()
    print("publish seconds, idle and busy:", idle, busy)
    assert statistics.median(busy) <= 3 * statistics.median(idle)
    for number, task in enumerate(tasks):
        meta, ids = task.result()["meta_info"], task.result()["output_ids"]
        spans, logprobs = meta["weight_versions"], [one[0] for one in meta["output_token_logprobs"]]
        assert (len(ids), meta["finish_reason"]["type"]) == (2000, "length")
        assert [int(span["version"]) for span in spans] == list(range(version - 3, version + 1))
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        expected = [recomputed(weights, [1, 2, number], ids) for weights in versions]
        for span in spans:
            part = slice(span["start"], span["end"])
            assert logprobs[part] == pytest.approx(expected[int(span["version"]) % 2][part], abs=1e-4)


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
async def test_keys_and_values_of_a_pause_in_place_are_labelled_and_not_shared(
    engine: Client, versions: list[Path]
) -> None:
    """The calls of the gateway and the publish of the trainer with `engine.pause = "in_place"`."""
    prompt, begun = list(range(1, 65)), asyncio.Event()
    pool = EnginePool(PoolOptions(probe_every_s=0.05, keeps_kv=True))

    async def sample(count: int, *, stream: bool = False) -> GenerateResult:
        params = {"temperature": 1.0, "ignore_eos": True}
        order = GenerateRequest(np.array(prompt, np.int32), params, count, stream=stream)
        deadline = asyncio.get_running_loop().time() + 60
        return await pool.sample(order, Affinity("1", "x"), deadline, lambda _: begun.set())

    try:
        endpoint = await pool.add(EngineRecord(engine.url), wait_s=10)
        task = asyncio.create_task(sample(LONG, stream=True))
        await begun.wait()
        await EngineControl(engine.url, engine.http, keep_kv_of=0).load(versions[1], 1)
        over = await task
        assert ([span.version for span in over.spans], over.kv_version) == ([0, 1], 0)
        (_, zero, cut), (_, start, end) = over.spans
        assert (zero, start, end, len(over.ids), over.finish) == (0, cut, LONG, LONG, "length")
        old, new = (recomputed(weights, prompt, over.ids) for weights in versions)
        assert over.logprobs[:cut] == pytest.approx(old[:cut], abs=1e-4)
        assert over.logprobs[cut:] != pytest.approx(new[cut:], abs=1e-4), "keys and values were not kept"
        await eventually(lambda: endpoint.version == 1)
        first, second = await sample(20), await sample(20)
        assert (first.cached_tokens, second.cached_tokens) == (0, 63)
        for reply in (first, second):
            assert ([span.version for span in reply.spans], reply.kv_version) == ([1], None)
            assert reply.logprobs == pytest.approx(recomputed(versions[1], prompt, reply.ids), abs=1e-4)
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "cache_salt": "0"}
        _, stale = await engine.post("/generate", body)
        assert stale["meta_info"]["cached_tokens"] == 63, "those of version 0 are still there"
    finally:
        await pool.close()


async def test_half_of_the_weights_are_of_no_version(engine: Client, versions: list[Path]) -> None:
    """Those of a trainer that fails in between; SGLang has them live. Files put it right."""

    def half(most_bytes: int) -> Generator[dict[str, torch.Tensor], None, None]:
        whole = buckets_of(versions[1])(most_bytes)
        yield next(whole)
        yield next(whole)
        raise RuntimeError("a rank is gone")

    control = EngineControl(engine.url, engine.http)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        await WeightBroadcaster(half, print, bucket_bytes=100_000).send([control], 1)
    meta = (await engine.generate([1, 2, 3], max_new_tokens=5, ignore_eos=True))["meta_info"]
    # The embedded engine keeps what comes beside the old ones.
    assert [span["version"] for span in meta["weight_versions"]] in (["partial"], ["0"])
    await control.load(versions[1], 1)
    reply = await engine.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    assert reply["meta_info"]["weight_version"] == "1"
    said = [one[0] for one in reply["meta_info"]["output_token_logprobs"]]
    assert said == pytest.approx(recomputed(versions[1], [1, 2, 3], reply["output_ids"]), abs=1e-4)


async def test_a_paused_request_waits_and_continues_with_the_same_tokens(engine: Client) -> None:
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
