"""SGLang's protocol over HTTP, with the real engine on a tiny model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.integration.engine.engine_http import Client, serving
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder

LONG = 1000
"""Output tokens that outlast whatever a test does meanwhile (a second or more)."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp(f"v{i}") for i in range(2)]
    for seed, path in enumerate(paths):
        make_tiny_model(path, vocab=640, seed=seed)
        make_tokenizer().save_pretrained(path)
    return paths


@pytest.fixture(scope="module")
def parts(directories: list[Path]) -> tuple[EngineOptions, Model, TokenDecoder]:
    options = EngineOptions(directories[0], max_slots=4, max_context=2048, weight_version=3)
    return options, load_model(options), TokenDecoder.load(directories[0])


@pytest.fixture
async def client(
    parts: tuple[EngineOptions, Model, TokenDecoder], directories: list[Path]
) -> AsyncIterator[Client]:
    options, model, text = parts
    model.copy_weights(model.read_weights(directories[0]))
    model.cache.drop()
    async with serving(Engine(options, model, text)) as client:
        yield client


async def test_a_reply_has_sglangs_shape(client: Client) -> None:
    reply = await client.generate([1, 2, 3], rid="mine", max_new_tokens=5, sampling_seed=1, ignore_eos=True)
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 5
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 5, 0)
    assert [one[1] for one in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(one[0] < 0 and one[2] is None for one in meta["output_token_logprobs"])
    assert meta["weight_version"] == "3"
    assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 5}]
    assert "kv_version" not in meta
    again = await client.generate([1, 2, 3], max_new_tokens=5, sampling_seed=1, ignore_eos=True)
    assert again["output_ids"] == reply["output_ids"]


async def test_a_stream_is_cumulative_and_ends_like_the_reply(client: Client) -> None:
    params = {"max_new_tokens": 60, "sampling_seed": 5, "ignore_eos": True}
    whole = await client.generate([1, 2, 3], **params)
    events = [event async for event in client.stream([1, 2, 3], **params)]
    assert len(events) > 3
    for earlier, later in itertools.pairwise(events):
        count = len(earlier["output_ids"])
        assert later["output_ids"][:count] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["completion_tokens"] == count
        assert len(earlier["meta_info"]["output_token_logprobs"]) == count
        assert earlier["meta_info"]["finish_reason"] is None
        assert earlier["meta_info"]["weight_version"] == "3"
    last = events[-1]
    for reply in (last, whole):
        reply["meta_info"].pop("e2e_latency")
        reply["meta_info"].pop("id")
        reply["meta_info"].pop("cached_tokens")  # the second finds the prompt of the first
    assert last == whole


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", {"input_ids": [640]}, "input_ids[0] = 640"),
        ("/generate", {"input_ids": []}, "input_ids is empty"),
        ("/generate", {"input_ids": [1] * 2048}, "max_context = 2048"),
        ("/generate", {"input_ids": [1], "sampling_params": {"min_p": 1.2}}, "min_p"),
        ("/generate", {"input_ids": [1], "sampling_params": {"logit_bias": {"1": 5}}}, "logit_bias"),
        ("/generate", [1], "the body"),
        ("/abort_request", {"rid": ""}, "rid = ''"),
        ("/abort_request", {}, "rid = None"),
        ("/pause_generation", {"mode": "gently"}, "mode = 'gently'"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": 1.5}, "weight_version"),
        ("/update_weight_version", {}, "new_version"),
    ],
)
async def test_what_is_refused_is_named(client: Client, path: str, body: Any, words: str) -> None:
    status, reply = await client.post(path, body)
    assert status == 400
    assert words in reply["error"]["message"]


async def test_a_body_that_is_not_json_and_an_unknown_path(client: Client) -> None:
    async with client.http.post(client.url + "/generate", data=b"{") as reply:
        assert reply.status == 400
        assert "not JSON" in (await reply.json())["error"]["message"]
    status, body = await client.post("/update_weights_from_tensor")
    assert status == 404
    assert "/update_weights_from_tensor" in body["error"]["message"]


async def test_abort_ends_requests_with_that_prefix_and_no_others(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        rids = ("job-1", "job-12", "other")
        waiting = [
            group.create_task(client.generate([1, 2], rid, max_new_tokens=LONG, ignore_eos=True))
            for rid in rids
        ]
        await client.until(lambda info: info["num_running"] == 3 and info["tokens_sampled"] > 10)
        status, body = await client.post("/abort_request", {"rid": "job-1"})
        assert (status, body["aborted"]) == (200, 2)
        first, second = await waiting[0], await waiting[1]
        assert not waiting[2].done()
        assert (await client.info())["num_running"] == 1
        await client.post("/abort_request", {"abort_all": True})
    for reply in (first, second):
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        count = len(reply["output_ids"])
        assert 0 < count < LONG
        assert len(reply["meta_info"]["output_token_logprobs"]) == count
        assert reply["meta_info"]["weight_versions"] == [{"version": "3", "start": 0, "end": count}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(client: Client, stream: bool) -> None:
    params = {"max_new_tokens": LONG, "ignore_eos": True}
    body = {"input_ids": [1, 2], "stream": stream, "sampling_params": params}
    async with aiohttp.ClientSession() as leaving:
        task = asyncio.create_task(leaving.post(client.url + "/generate", json=body))
        await client.until(lambda info: info["tokens_sampled"] > 5)
        task.cancel()
    await client.until(lambda info: info["num_running"] == 0)
    assert (await client.info())["tokens_sampled"] < LONG


async def test_a_client_that_goes_away_while_it_is_paused(client: Client) -> None:
    await client.post("/pause_generation", {"mode": "retract"})
    async with aiohttp.ClientSession() as leaving:
        task = asyncio.create_task(leaving.post(client.url + "/generate", json={"input_ids": [1]}))
        await client.until(lambda info: info["num_waiting"] == 1)
        task.cancel()
    await client.until(lambda info: info["num_waiting"] == 0)


async def test_paused_requests_wait_and_health_answers(client: Client) -> None:
    await client.post("/pause_generation", {"mode": "retract"})
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(client.generate([1, 2], max_new_tokens=2, ignore_eos=True))
        await client.until(lambda info: info["num_waiting"] == 1)
        async with asyncio.timeout(1):
            assert (await client.get("/health"))[0] == 200
        assert not waiting.done()
        assert (await client.info())["paused"] == "retract"
        await client.post("/continue_generation")
    assert len((await waiting)["output_ids"]) == 2
    assert (await client.get("/health_generate"))[0] == 200


async def test_pause_aborts_by_default_as_in_sglang(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(client.generate([1, 2], max_new_tokens=LONG, ignore_eos=True))
        await client.until(lambda info: info["tokens_sampled"] > 3)
        await client.post("/pause_generation")
    assert (await waiting)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("paused", [True, False])
async def test_weights_change_under_running_requests(
    client: Client, directories: list[Path], paused: bool
) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(client.generate([1, 2, 3], max_new_tokens=300, ignore_eos=True))
        await client.until(lambda info: info["tokens_sampled"] > 10)
        if paused:
            await client.post("/pause_generation", {"mode": "retract"})
        body = {"model_path": str(directories[1]), "weight_version": "4"}
        status, loaded = await client.post("/update_weights_from_disk", body)
        assert (status, loaded["success"], loaded["num_paused_requests"]) == (200, True, 1)
        assert (await client.info())["weight_version"] == "4"
        await client.post("/continue_generation")
    meta = (await waiting)["meta_info"]
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["3", "4"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 300)
    assert meta["weight_version"] == "4"


@pytest.mark.parametrize("flush", [True, False])
async def test_in_place_keeps_the_cache_only_without_a_flush(
    client: Client, directories: list[Path], flush: bool
) -> None:
    """`flush_cache` is true by default; with it nothing reports failure, and no old keys are left."""
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(client.generate([1, 2, 3], "long", max_new_tokens=LONG, ignore_eos=True))
        await client.until(lambda info: info["tokens_sampled"] > 10)
        await client.post("/pause_generation", {"mode": "in_place"})
        body = {"model_path": str(directories[1]), "weight_version": 4}
        status, _ = await client.post(
            "/update_weights_from_disk", body if flush else {**body, "flush_cache": False}
        )
        assert status == 200
        info = await client.info()
        assert (info["weight_version"], info["num_running"]) == ("4", 0 if flush else 1)
        await client.post("/continue_generation")
        await client.until(lambda later: later["tokens_sampled"] > info["tokens_sampled"] + 10)
        await client.post("/abort_request", {"rid": "long"})
    meta = (await waiting)["meta_info"]
    assert meta.get("kv_version") == (None if flush else "3")
    assert [span["version"] for span in meta["weight_versions"]] == ["3", "4"]


async def test_a_version_can_be_named_alone(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(client.generate([1, 2], max_new_tokens=LONG, ignore_eos=True))
        await client.until(lambda info: info["tokens_sampled"] > 3)
        status, _ = await client.post("/update_weight_version", {"new_version": "9"})  # aborts, as in SGLang
        assert status == 200
    assert (await waiting)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.generate([1], max_new_tokens=1))["meta_info"]["weight_version"] == "9"


async def test_flush_and_a_second_use_of_a_rid_are_refused_while_busy(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(client.generate([1, 2], rid="a", max_new_tokens=LONG, ignore_eos=True))
        await client.until(lambda info: info["num_running"] == 1)
        status, body = await client.post("/flush_cache")
        assert (status, body["success"]) == (400, False)
        status, body = await client.post("/generate", {"input_ids": [1], "rid": "a"})
        assert (status, body["error"]["message"]) == (400, "rid 'a' is in use")
        await client.post("/abort_request", {"rid": "a"})
    assert (await client.post("/flush_cache"))[0] == 200


async def test_the_models_own_end_token_and_stop_ids_end_a_request(client: Client, parts: Any) -> None:
    free = await client.generate([1, 2, 3], max_new_tokens=40, sampling_seed=2, ignore_eos=True)
    ids = free["output_ids"]
    token = next(one for one in ids[5:] if ids.index(one) >= 5)
    reply = await client.generate([1, 2, 3], max_new_tokens=40, sampling_seed=2, stop_token_ids=[token])
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert reply["output_ids"] == ids[: ids.index(token) + 1]
    decode = parts[2].tokenizer.decode
    assert reply["text"] == decode(reply["output_ids"][:-1], skip_special_tokens=True)
    eos = parts[2].tokenizer.eos_token_id
    seeds = range(8)
    replies = await asyncio.gather(
        *(client.generate([1, 2], max_new_tokens=300, sampling_seed=i, temperature=2.0) for i in seeds)
    )
    ended = [r for r in replies if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    assert all(r["output_ids"].index(eos) == len(r["output_ids"]) - 1 for r in ended)


async def test_a_stop_string_may_begin_in_the_middle_of_a_token(client: Client, parts: Any) -> None:
    decode = parts[2].tokenizer.decode
    params = {"max_new_tokens": 60, "sampling_seed": 3, "ignore_eos": True, "temperature": 1.0}
    free = await client.generate([1, 2, 3], **params)
    text, ids = free["text"], free["output_ids"]
    at = next(i for i in range(20, len(text)) if "�" not in text[i : i + 7])
    stop = text[at : at + 7]
    assert text.find(stop) == at
    assert not any(stop in decode(ids[i : i + 2]) for i in range(len(ids)))  # it takes three tokens or more
    reply = await client.generate([1, 2, 3], **params, stop=["never this", stop])
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["text"] == text[:at]
    count = len(reply["output_ids"])
    assert reply["output_ids"] == ids[:count]
    assert stop not in decode(reply["output_ids"][:-1], skip_special_tokens=True)


async def test_the_context_ends_a_request_with_length(client: Client) -> None:
    prompt = [1] * 2040
    reply = await client.generate(prompt, max_new_tokens=500, ignore_eos=True)
    assert len(reply["output_ids"]) == 8
    assert reply["meta_info"]["finish_reason"]["type"] == "length"


async def test_bad_weights_are_refused_and_nothing_changes(
    client: Client, directories: list[Path], tmp_path: Path
) -> None:
    before = await client.generate([1, 2, 3], max_new_tokens=10, sampling_seed=1, ignore_eos=True)
    whole = (directories[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for path in (tmp_path, tmp_path / "nowhere"):
        body = {"model_path": str(path), "weight_version": "4"}
        status, reply = await client.post("/update_weights_from_disk", body)
        assert (status, reply["success"]) == (400, False)
        assert str(path) in reply["message"]
    assert (await client.info())["weight_version"] == "3"
    after = await client.generate([1, 2, 3], max_new_tokens=10, sampling_seed=1, ignore_eos=True)
    assert after["output_ids"] == before["output_ids"]
    assert torch.equal(
        torch.tensor([one[0] for one in after["meta_info"]["output_token_logprobs"]]),
        torch.tensor([one[0] for one in before["meta_info"]["output_token_logprobs"]]),
    )
