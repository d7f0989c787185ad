"""Logprobs of prompts: against the plain model, and against those of the same tokens when sampled."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.engine.engine_drive import Driver
from tests.integration.engine.engine_http import Client, serving
from tests.tiny import make_tiny_model
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.engine.scheduling import running_batch
from tidegate.types import LISTED, PACKED_LISTS

TOLERANCE = 1e-4
CONTEXT = 256


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    plain = make_tiny_model(directory, family=request.param)
    return load_model(EngineOptions(directory, max_slots=8, max_context=CONTEXT)), plain


def score(driver: Driver, ids: list[int], start: int, max_new_tokens: int = 0, **params: Any) -> Generation:
    body = {
        "input_ids": ids, "return_logprob": True, "logprob_start_len": start,
        "sampling_params": {"max_new_tokens": max_new_tokens, **params},
    }  # fmt: skip
    generation = parse_generate(body, driver.limits)
    driver.scheduler.submit(generation)
    return generation


def plain_scores(hf_model: Any, ids: list[int], start: int) -> list[float]:
    with torch.no_grad():
        logits = hf_model(input_ids=torch.tensor([ids])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[at - 1, ids[at]]) for at in range(start + 1, len(ids))]


@pytest.mark.parametrize("prefix_bytes", [0, 2**26])
@pytest.mark.parametrize("passes", ["whole", "pieces"])
def test_logprobs_of_a_prompt_are_the_plain_models(
    loaded: tuple[Model, Any], monkeypatch: pytest.MonkeyPatch, prefix_bytes: int, passes: str
) -> None:
    model, plain = loaded
    if passes == "pieces":
        monkeypatch.setattr(model, "max_scored_tokens", 23)
        monkeypatch.setattr(running_batch, "CHUNK_TOKENS", 9)
    driver = Driver(model, prefix_bytes=prefix_bytes)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 97, 70).tolist()
    scored = []
    for number in range(24):  # with a common beginning or none, among requests that sample
        own = rng.integers(0, 97, int(rng.integers(1, 60))).tolist()
        ids = [*(shared[: int(rng.integers(0, 70))] if number % 2 else []), *own]
        scored.append(
            score(driver, ids, int(rng.integers(0, len(ids))), max_new_tokens=5 * (number % 3 == 0))
        )
        if number % 4 == 0:
            driver.submit(own, max_new_tokens=12)
        driver.scheduler.run_once()
    driver.finish(scored)
    for one in scored:
        assert one.error is None
        assert one.logprob_start is not None
        expected = plain_scores(plain, one.prompt_ids, one.logprob_start)
        assert one.prompt_logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert len(one.output_ids) == one.limit
    if prefix_bytes:
        assert driver.scheduler.counters.tokens_reused > 0


def test_logprobs_of_a_prompt_are_those_with_which_the_tokens_were_sampled(loaded: tuple[Model, Any]) -> None:
    model, _ = loaded
    driver = Driver(model)
    sampled = [driver.submit([n, 5, 9, *range(n)], max_new_tokens=40, sampling_seed=n) for n in range(12)]
    driver.finish(sampled)
    scored = [score(driver, one.prompt_ids + one.output_ids, len(one.prompt_ids) - 1) for one in sampled]
    driver.finish(scored)
    for one, again in zip(sampled, scored, strict=True):
        assert again.prompt_logprobs == pytest.approx(one.logprobs, abs=TOLERANCE)


def test_the_temperature_and_penalties_do_not_change_them(loaded: tuple[Model, Any]) -> None:
    driver = Driver(loaded[0])
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    plain = score(driver, ids, 0)
    changed = score(driver, ids, 0, max_new_tokens=2, temperature=0.3, frequency_penalty=1.0, top_k=1)
    driver.finish([plain, changed])
    assert changed.prompt_logprobs == pytest.approx(plain.prompt_logprobs, abs=TOLERANCE)


def test_all_logprobs_of_a_prompt_are_of_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights arrive when a part of the prompt is computed."""
    models = [make_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new"))]
    model = load_model(EngineOptions(tmp_path / "old", max_slots=4, max_context=CONTEXT))
    monkeypatch.setattr(model, "max_scored_tokens", 20)
    driver = Driver(model)
    ids = np.random.default_rng(0).integers(0, 97, 90).tolist()
    one = score(driver, ids, 10)
    driver.until(lambda: len(one.prompt_logprobs) > 25)
    assert not one.ended
    driver.scheduler.load(model.read_weights(tmp_path / "new"), "1", keep_cache=False, abort_all=False)
    driver.finish([one])
    assert one.prompt_logprobs == pytest.approx(plain_scores(models[1], ids, 10), abs=TOLERANCE)


@pytest.mark.parametrize("top", [1, 5, 97])
def test_the_likeliest_ids_are_the_plain_models(loaded: tuple[Model, Any], top: int) -> None:
    model, plain = loaded
    driver = Driver(model)
    ids = np.random.default_rng(top).integers(0, 97, 30).tolist()
    one = parse_generate({**body(ids, 7, 0), "top_logprobs_num": top}, driver.limits)
    driver.scheduler.submit(one)
    driver.finish([one])
    with torch.no_grad():
        expected = torch.log_softmax(plain(input_ids=torch.tensor([ids])).logits[0, 7:-1], -1).topk(top)
    assert [[id for _, id in pairs] for pairs in one.prompt_top] == expected.indices.tolist()
    found = torch.tensor([[logprob for logprob, _ in pairs] for pairs in one.prompt_top])
    torch.testing.assert_close(found, expected.values, atol=TOLERANCE, rtol=0)


def test_a_sequence_may_fill_the_context(loaded: tuple[Model, Any]) -> None:
    model, plain = loaded
    driver = Driver(model)
    ids = np.random.default_rng(0).integers(0, 97, CONTEXT).tolist()
    one = score(driver, ids, CONTEXT - 3)
    driver.finish([one])
    assert one.prompt_logprobs == pytest.approx(plain_scores(plain, ids, CONTEXT - 3), abs=TOLERANCE)
    assert one.finish_reason == {"type": "length", "length": 0}


async def test_the_reply_has_sglangs_form(tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path)
    options = EngineOptions(tmp_path, max_slots=2, max_context=CONTEXT)
    async with serving(Engine(options, load_model(options), TokenDecoder.load(tmp_path))) as client:
        for count in (0, 3):
            meta = (await scored(client, [1, 2, 3, 4], 1, count))["meta_info"]
            values, ids, texts = zip(*meta["input_token_logprobs"], strict=True)
            assert (ids, texts, values[0]) == ((2, 3, 4), (None,) * 3, None)
            assert values[1:] == pytest.approx(plain_scores(plain, [1, 2, 3, 4], 1), abs=TOLERANCE)
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == count
        _, twice = await client.post("/generate", body([1, 2], 0, 1, n=2))
        assert [len(reply["meta_info"]["input_token_logprobs"]) for reply in twice] == [2, 2]
        assert "input_token_logprobs" not in (await client.generate([1, 2], max_new_tokens=1))["meta_info"]
        _, top = await client.post("/generate", {**body([1, 2, 3], 0, 0), "top_logprobs_num": 2})
        assert [row and len(row) for row in top["meta_info"]["input_top_logprobs"]] == [None, 2, 2]
        assert top["meta_info"]["input_top_logprobs"][1][0][2] is None
        request = {**body([1, 2, 3], 1, 4), "top_logprobs_num": 2}
        request["sampling_params"]["sampling_seed"] = 1
        meta = (await client.post("/generate", request))[1]["meta_info"]
        assert [len(row) for row in meta["output_top_logprobs"]] == [2] * meta["completion_tokens"]
        assert [row and len(row) for row in meta["input_top_logprobs"]] == [None, 2]
        url, headers = client.url + "/generate", {PACKED_LISTS: "1"}
        async with client.http.post(url, json=request, headers=headers) as sent:
            packed = base64.b64decode((await sent.json())["meta_info"]["output_top_logprobs"])
        pairs = np.frombuffer(packed, LISTED).reshape(meta["completion_tokens"], 2).tolist()
        assert pairs == [[(p, id) for p, id, _ in row] for row in meta["output_top_logprobs"]]
        _, plain_reply = await client.post("/generate", body([1, 2, 3], 1, 4))
        assert "output_top_logprobs" not in plain_reply["meta_info"]
        for refused, words in (
            ({**body([1, 2], 0, 0), "top_logprobs_num": 98}, "from 0 to 97, the size of the vocabulary"),
            (body([1, 2], 2, 0), "logprob_start_len = 2: it must be the index"),
            (body([1, 2], -2, 0), "logprob_start_len = -2"),
            (body([1, 2], True, 0), "logprob_start_len = True: it must be an integer"),
            ({**body([1, 2], 0, 0), "return_logprob": False}, "no effect without return_logprob"),
            ({**body([1, 2], -1, 0)}, "max_new_tokens = 0: it must be at least 1, unless"),
            (body([1] * (CONTEXT + 1), 0, 0), f"which must be at most max_context = {CONTEXT}"),
        ):
            status, reply = await client.post("/generate", refused)
            assert status == 400
            assert words in reply["error"]["message"]


def body(ids: list[int], start: int, count: int, **params: Any) -> dict[str, Any]:
    params = {"max_new_tokens": count, "ignore_eos": True, **params}
    return {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, "sampling_params": params}


async def scored(client: Client, ids: list[int], start: int, count: int) -> Any:
    status, reply = await client.post("/generate", body(ids, start, count))
    assert status == 200, reply
    return reply
