"""The contract of engines with SGLang's protocol: the same calls, shapes and numbers from every engine.

A suite subclasses `EngineContract` and defines the fixtures `engine` (a client of a server at version 0) and
`versions` (the directories of versions 0 and 1).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.engine.engine_http import Client
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult, read_reply, request_body
from tidegate.service.service import Service

LONG = 400
META = {
    "id": str, "finish_reason": dict, "prompt_tokens": int, "completion_tokens": int, "cached_tokens": int,
    "weight_version": str, "weight_versions": list, "output_token_logprobs": list, "e2e_latency": float,
}  # fmt: skip
CALL_S = 120.0


def make_versions(tmp_path_factory: pytest.TempPathFactory, hidden: int = 64) -> list[Path]:
    """Two versions of a random model's weights."""
    paths = [tmp_path_factory.mktemp(f"v{version}") for version in range(2)]
    for seed, path in enumerate(paths):
        make_tiny_model(path, vocab=640, hidden=hidden, seed=seed)
        make_tokenizer().save_pretrained(path)
    return paths


def embedded(weights: Path, place: Path) -> Service:
    """The embedded engine, which receives the same calls."""
    arguments = ["--model.path", str(weights), "--engine.max_context=2048", "--weight-version", "0"]
    return Service("engine", lambda: arguments, place)


@asynccontextmanager
async def served(service: Service) -> AsyncIterator[Client]:
    """A client of the running server."""
    try:
        url = await service.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as http:
            yield Client(url, http)
    finally:
        await service.stop()


async def load(engine: Client, weights: Path, version: int) -> None:
    body = {"model_path": str(weights), "weight_version": str(version), "abort_all_requests": False}
    status, answer = await engine.post("/update_weights_from_disk", {**body, "flush_cache": True})
    assert status == 200, answer
    assert answer["success"]


async def at_the_beginning(engine: Client, versions: list[Path]) -> None:
    """Restores version 0 and resumes the engine."""
    await engine.post("/pause_generation", {"mode": "retract"})
    await load(engine, versions[0], 0)
    await engine.post("/continue_generation", {})


async def last_event(stream: AsyncIterator[Any]) -> Any:
    """The last event of the rest of a stream."""
    return [event async for event in stream][-1]


def recomputed(weights: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    found: list[float] = logprobs[torch.arange(len(output)), output].tolist()
    return found


class EngineContract:
    cached = 63
    """Minimum number of cached tokens of a prompt of 64."""

    async def test_a_replys_fields_have_these_names_and_types(self, engine: Client) -> None:
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
        self, engine: Client, versions: list[Path], temperature: float
    ) -> None:
        reply = await engine.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=temperature)
        said = [one[0] for one in reply["meta_info"]["output_token_logprobs"]]
        expected = recomputed(versions[0], [1, 2, 3], reply["output_ids"], temperature)
        assert said == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
    async def test_likeliest_ids_are_of_the_distribution_that_is_sampled(
        self, engine: Client, versions: list[Path], stream: bool
    ) -> None:
        """As the gateway reads them: of the temperature, likeliest first, also where another id was drawn."""
        params = {"temperature": 2.0, "ignore_eos": True}
        order = GenerateRequest(np.array([1, 2, 3], np.int32), params, 20, stream=stream, top_logprobs=24)
        if stream:
            reply = await last_event(engine.stream([1, 2, 3], listed=24, max_new_tokens=20, **params))
        else:
            body = json.loads(request_body(order, GenerateResult(), "listed"))
            status, reply = await engine.post("/generate", body)
            assert status == 200, reply
        sampled = read_reply(reply, partial=stream, top_logprobs=24)
        assert order.has_logprobs(sampled)
        model = AutoModelForCausalLM.from_pretrained(versions[0], dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([[1, 2, 3, *sampled.ids]])).logits[0, 2:-1] / 2.0
        expected = torch.log_softmax(logits, -1)
        ids, values = (torch.tensor(np.stack(rows)) for rows in zip(*sampled.top, strict=True))
        assert ids.shape == (20, 24)
        assert not (ids == torch.tensor(sampled.ids)[:, None]).any(1).all(), "the case proves too little"
        torch.testing.assert_close(values, expected.topk(24).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(values, expected.gather(1, ids.long()), rtol=0, atol=1e-4)

    async def test_logprobs_of_a_prompt_are_the_models_at_temperature_1(
        self, engine: Client, versions: list[Path]
    ) -> None:
        ids = [7 + 3 * n % 500 for n in range(40)]
        body = {
            "input_ids": ids, "return_logprob": True, "logprob_start_len": 9,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        }  # fmt: skip
        status, reply = await engine.post("/generate", body)
        assert status == 200, reply
        values, tokens, _ = zip(*reply["meta_info"]["input_token_logprobs"], strict=True)
        assert (list(tokens), values[0]) == (ids[9:], None)
        assert list(values[1:]) == pytest.approx(recomputed(versions[0], ids[:10], ids[10:]), abs=1e-4)

    async def test_greedy_ids_are_the_models_own(self, engine: Client, versions: list[Path]) -> None:
        reply = await engine.generate([5, 6, 7], max_new_tokens=30, ignore_eos=True, temperature=0)
        model = AutoModelForCausalLM.from_pretrained(versions[0], dtype=torch.float32)
        with torch.no_grad():
            best = model(torch.tensor([[5, 6, 7, *reply["output_ids"]]])).logits[0, 2:-1].argmax(-1).tolist()
        assert reply["output_ids"] == best

    async def test_a_streams_events_are_cumulative(self, engine: Client) -> None:
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

    async def test_a_stop_id_ends_and_is_named(self, engine: Client) -> None:
        sampled = await engine.generate([9, 8], max_new_tokens=20, ignore_eos=True, temperature=0)
        stop = sampled["output_ids"][7]
        reply = await engine.generate([9, 8], max_new_tokens=20, temperature=0, stop_token_ids=[stop])
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert reply["output_ids"] == sampled["output_ids"][: sampled["output_ids"].index(stop) + 1]

    async def test_a_repeated_prefix_is_taken_from_the_cache(self, engine: Client) -> None:
        prompt = [7 + n % 500 for n in range(64)]
        first = await engine.generate(prompt, max_new_tokens=2, ignore_eos=True)
        again = await engine.generate([*prompt, 3, 4], max_new_tokens=2, ignore_eos=True)
        assert first["meta_info"]["cached_tokens"] == 0
        assert again["meta_info"]["cached_tokens"] >= self.cached

    async def test_pause_aborts_by_default(self, engine: Client) -> None:
        events = []
        async for event in engine.stream([1, 2], max_new_tokens=LONG, ignore_eos=True):
            events.append(event)
            if len(events) == 2:
                await engine.post("/pause_generation", {})
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(events[-1]["output_ids"]) < LONG
        await engine.post("/continue_generation", {})

    async def test_abort_matches_by_prefix(self, engine: Client) -> None:
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            kinds = {"max_new_tokens": LONG, "ignore_eos": True}
            # SGLang requires the id of a running request, and aborts all ids with this prefix.
            streams = [engine.stream([1, 3], rid=rid, **kinds) for rid in ("job-1", "job-12", "other")]
            await asyncio.gather(*map(anext, streams))  # they run
            async with engine.http.post(engine.url + "/abort_request", json={"rid": "job-1"}) as answer:
                assert answer.status == 200  # SGLang's response has no body
            rests = [group.create_task(last_event(stream)) for stream in streams]
        reasons = [rest.result()["meta_info"]["finish_reason"]["type"] for rest in rests]
        assert reasons == ["abort", "abort", "length"]

    async def test_a_json_schema_is_followed(self, engine: Client) -> None:
        properties = {"a": {"type": "boolean"}}
        schema = {
            "type": "object",
            "properties": properties,
            "required": ["a"],
            "additionalProperties": False,
        }
        reply = await engine.generate([1, 2], max_new_tokens=300, json_schema=json.dumps(schema))
        text = make_tokenizer().decode(reply["output_ids"], skip_special_tokens=True)
        assert "".join(text.split()) in ('{"a":true}', '{"a":false}')
