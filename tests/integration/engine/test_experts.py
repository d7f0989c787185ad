"""The engine returns the experts of every token: those with which it was computed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.engine.engine_drive import Driver
from tests.integration.engine.engine_http import serving
from tests.tiny import make_tiny_model
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.engine.validation import RequestError
from tidegate.weights.internals import routers

WIDTH = 4
"""Two layers with two experts for each token."""


def load(directory: Path, seed: int = 0, family: str = "qwen3_moe", slots: int = 4) -> tuple[Model, Any]:
    plain = make_tiny_model(directory, family=family, seed=seed, hidden=32)
    return load_model(EngineOptions(directory, max_slots=slots, max_context=256)), plain


def chosen_by(plain: Any, ids: list[int]) -> np.ndarray:
    """The experts that the plain model chooses, [tokens, layers · k]."""
    found: list[torch.Tensor] = []
    hooks = [
        one.register_forward_hook(lambda _, __, routed: found.append(routed[2]))
        for one in routers(plain).values()
    ]
    with torch.no_grad():
        plain(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.cat(found, -1).numpy()


def submit(driver: Driver, prompt: list[int], start: int = 0, **params: Any) -> Generation:
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    body |= {"return_routed_experts": True, "routed_experts_start_len": start}
    one = parse_generate(body, driver.limits)
    driver.scheduler.submit(one)
    return one


def expected(plain: Any, one: Generation, start: int = 0) -> np.ndarray:
    return chosen_by(plain, (one.prompt_ids + one.output_ids)[:-1])[start:]


def test_experts_are_the_plain_models_in_a_crowd_and_from_the_prefix_cache(tmp_path: Path) -> None:
    """Turns of conversations whose beginnings are cached, in rows that move, some retracted."""
    model, plain = load(tmp_path)
    driver = Driver(model, prefix_bytes=2**24)
    rng = np.random.default_rng(0)
    common = rng.integers(0, 97, 40).tolist()
    starts = [0, 39, 40, 0, 17, 0, 5, 41]
    first = [
        submit(
            driver, common + rng.integers(0, 97, 1 + at).tolist(), starts[at],
            max_new_tokens=5 + 3 * at, sampling_seed=at,
        )
        for at in range(len(starts))
    ]  # fmt: skip
    driver.until(lambda: len(first[0].output_ids) >= 4)
    driver.scheduler.pause("retract")
    driver.scheduler.resume()
    driver.finish(first)
    reused = driver.scheduler.counters.tokens_reused
    second = []
    for at, one in enumerate(first):
        known = one.prompt_ids + one.output_ids
        second.append(submit(driver, [*known, 3, 1], len(known) - 1, max_new_tokens=9, sampling_seed=50 + at))
    driver.finish(second)
    assert driver.scheduler.counters.tokens_reused > reused + 8 * 32
    for one, start in zip(first, starts, strict=True):
        assert np.array_equal(np.concatenate(one.experts), expected(plain, one, start))
    for before, one in zip(first, second, strict=True):
        start = len(before.prompt_ids) + len(before.output_ids) - 1
        found = np.concatenate(one.experts)
        assert found.shape == (11, WIDTH)
        assert np.array_equal(found, expected(plain, one, start))


def test_tokens_before_new_weights_keep_the_experts_that_sampled_them(tmp_path: Path) -> None:
    model, old = load(tmp_path / "old")
    new = make_tiny_model(tmp_path / "new", family="qwen3_moe", seed=1, hidden=32)
    driver = Driver(model)
    one = submit(driver, [1, 2, 3, 4, 5], max_new_tokens=20)
    driver.until(lambda: len(one.output_ids) == 8)
    driver.scheduler.load(model.read_weights(tmp_path / "new"), "1", keep_cache=False, abort_all=False)
    driver.finish([one])
    ids = (one.prompt_ids + one.output_ids)[:-1]
    found = np.concatenate(one.experts)
    assert np.array_equal(found[:12], chosen_by(old, ids)[:12])
    assert np.array_equal(found[12:], chosen_by(new, ids)[12:])
    assert not np.array_equal(found[:12], chosen_by(new, ids)[:12])


def test_an_aborted_reply_has_the_experts_of_its_tokens(tmp_path: Path) -> None:
    model, plain = load(tmp_path)
    driver = Driver(model)
    one, other = (submit(driver, [7, 8, at], max_new_tokens=50) for at in (1, 2))
    driver.until(lambda: len(one.output_ids) == 5)
    driver.scheduler.abort_one(one)
    driver.finish([one, other])
    for each in (one, other):
        assert np.array_equal(np.concatenate(each.experts), expected(plain, each))


async def test_the_reply_has_sglangs_form(tmp_path: Path) -> None:
    model, plain = load(tmp_path)
    options = EngineOptions(tmp_path, max_slots=2, max_context=64)
    async with serving(Engine(options, model, TokenDecoder.load(tmp_path))) as client:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
        _, reply = await client.post("/generate", body)
        assert "routed_experts" not in reply["meta_info"]
        body |= {"return_routed_experts": True, "routed_experts_start_len": 2}
        _, reply = await client.post("/generate", body)
        rows = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(4, 2, 2)
        ids = [1, 2, 3, *reply["output_ids"]]
        assert np.array_equal(rows.reshape(4, WIDTH), chosen_by(plain, ids[:-1])[2:])
        status, reply = await client.post("/generate", {**body, "routed_experts_start_len": 4})
        assert (status, "from 0 to 3" in str(reply)) == (400, True)


async def test_a_model_without_experts_is_refused_by_name(tmp_path: Path) -> None:
    model, _ = load(tmp_path, family="qwen3")
    options = EngineOptions(tmp_path, max_slots=2, max_context=64)
    async with serving(Engine(options, model, TokenDecoder.load(tmp_path))) as client:
        status, reply = await client.post(
            "/generate",
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True},
        )
    assert status == 400
    assert "Qwen3ForCausalLM has no experts" in str(reply)


def test_a_prompt_alone_has_no_experts(tmp_path: Path) -> None:
    model, _ = load(tmp_path)
    body = {
        "input_ids": [1, 2],
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_routed_experts": True,
    }
    with pytest.raises(RequestError, match="max_new_tokens = 0"):
        parse_generate({**body, "sampling_params": {"max_new_tokens": 0}}, Driver(model).limits)
