"""The embedded engine compared with vLLM behind SGLang's protocol: the same calls, shapes and refusals.

Every test runs against both. Where they are known to differ, the difference is stated in the test.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from tests.engine_contract import LONG, EngineContract, at_the_beginning, load, recomputed
from tests.integration.engine.engine_http import Client
from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult, read_reply, request_body

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


class TestVLLM(EngineContract):
    cached = 32  # vLLM keeps whole blocks


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def fresh(engine: Client, versions: list[Path]) -> None:
    await at_the_beginning(engine, versions)


async def test_a_seed_gives_the_same_tokens_again(engine: Client) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 2**63 + 5}
    first, again = [await engine.generate([1, 2, 3], **params) for _ in range(2)]
    assert first["output_ids"] == again["output_ids"]


async def test_prompts_that_do_not_fit_into_one_pass_are_all_served(engine: Client) -> None:
    """4,096 tokens at once, of which vLLM takes 2,048 in a pass by default."""
    prompts = [[1 + number, *range(1, 64)] for number in range(64)]
    replies = await asyncio.gather(
        *(engine.generate(prompt, max_new_tokens=4, ignore_eos=True, sampling_seed=7) for prompt in prompts)
    )
    assert [len(reply["output_ids"]) for reply in replies] == [4] * 64


async def test_a_stop_string_ends_a_reply_and_is_kept_in_its_ids(engine: Client) -> None:
    params = {"max_new_tokens": 60, "temperature": 0}
    sampled = await engine.generate([9, 8], ignore_eos=True, **params)
    tokenizer = make_tokenizer()
    stop = tokenizer.decode(sampled["output_ids"][5:7])
    reply = await engine.generate([9, 8], stop=[stop], **params)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop in tokenizer.decode(reply["output_ids"])
    assert reply["output_ids"] == sampled["output_ids"][: len(reply["output_ids"])]


async def publish(engine: Client, weights: Path, version: int) -> None:
    """As the trainer does it."""
    await engine.post("/pause_generation", {"mode": "retract"})
    await load(engine, weights, version)
    assert (await engine.info())["weight_version"] == str(version)
    await engine.post("/continue_generation", {})


LONGER = 4 * LONG
"""So that a reply is still under way when a publish comes, also where the machine has more to do."""


async def whole(
    engine: Client, prompt: list[int], updates: Callable[[int], Any], *, stream: bool
) -> GenerateResult:
    """A reply of LONGER tokens as the gateway gets it: what was aborted goes on from its tokens."""
    params = {"temperature": 1.0, "ignore_eos": True}
    order = GenerateRequest(torch.tensor(prompt, dtype=torch.int32).numpy(), params, LONGER, stream=stream)
    sampled = GenerateResult()
    while sampled.finish not in ("stop", "length"):
        body = json.loads(request_body(order, sampled, f"{prompt}"))
        piece = GenerateResult()
        if stream:
            async for event in engine.stream(prompt + sampled.ids, **body["sampling_params"]):
                piece = read_reply(event, partial=True)
                await updates(len(sampled.ids) + len(piece.ids))
        else:
            piece = read_reply((await engine.post("/generate", body))[1])
        sampled.extend(piece)
    return sampled


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_weights_change_under_running_requests(
    engine: Client, versions: list[Path], stream: bool
) -> None:
    """vLLM's requests end at the update and are continued, the embedded engine's straddle it: after either,
    every recorded logprob is that of the version that the engine reported for its token."""
    published: list[int] = []

    async def update(at: int) -> None:
        if at >= 8 and not published:
            published.append(at)
            await publish(engine, versions[1], 1)

    async def nothing(_: int) -> None: ...

    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        others = [group.create_task(whole(engine, [1, 3, n], nothing, stream=stream)) for n in range(4)]
        watched = group.create_task(whole(engine, [1, 2, 3], update, stream=True))
    for prompt, task in [([1, 2, 3], watched), *(([1, 3, n], task) for n, task in enumerate(others))]:
        sampled = task.result()
        assert [span.version for span in sampled.spans] == [0, 1]
        assert (sampled.spans[0].start, sampled.spans[1].end, len(sampled.ids)) == (0, LONGER, LONGER)
        assert sampled.spans[0].end == sampled.spans[1].start
        for version, start, end in sampled.spans:
            expected = recomputed(versions[version], prompt, sampled.ids)
            assert sampled.logprobs[start:end] == pytest.approx(expected[start:end], abs=1e-4)
    assert published


async def test_an_update_without_a_pause_waits_for_what_runs_or_lets_it_go_on(
    engine: Client, versions: list[Path]
) -> None:
    """The embedded engine loads at once, and the reply has both versions; vLLM's ends before."""
    task = asyncio.create_task(engine.generate([1, 2], max_new_tokens=LONGER, ignore_eos=True))
    await engine.until(lambda info: info["num_running"] == 1)
    await load(engine, versions[1], 1)
    reply = await task
    assert len(reply["output_ids"]) == LONGER
    said = [one[0] for one in reply["meta_info"]["output_token_logprobs"]]
    for span in reply["meta_info"]["weight_versions"]:
        part = slice(span["start"], span["end"])
        expected = recomputed(versions[int(span["version"])], [1, 2], reply["output_ids"])
        assert said[part] == pytest.approx(expected[part], abs=1e-4)
    assert (await engine.info())["weight_version"] == "1"


async def test_what_comes_while_paused_waits_and_is_of_the_new_version(
    engine: Client, versions: list[Path]
) -> None:
    await engine.post("/pause_generation", {"mode": "retract"})
    task = asyncio.create_task(engine.generate([4, 4], max_new_tokens=30, ignore_eos=True))
    await load(engine, versions[1], 1)
    assert not task.done()
    assert (await engine.info())["paused"]
    await engine.post("/continue_generation", {})
    reply = await task
    assert reply["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 30}]
    said = [one[0] for one in reply["meta_info"]["output_token_logprobs"]]
    assert said == pytest.approx(recomputed(versions[1], [4, 4], reply["output_ids"]), abs=1e-4)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_goes_away_ends_its_request(engine: Client, stream: bool) -> None:
    # Long enough that it is seen to run: vLLM may answer a probe only after seconds.
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    call = asyncio.create_task(engine.http.post(engine.url + "/generate", json={**body, "stream": stream}))
    await engine.until(lambda info: info["num_running"] == 1)
    if stream:
        (await call).close()
    else:
        call.cancel()
    await engine.until(lambda info: info["num_running"] == 0)


def spoiled(versions: list[Path], place: Path, how: str) -> Path:
    """Version 1 with a fault."""
    broken = place / how
    if how == "missing directory":
        return broken
    shutil.copytree(versions[1], broken)
    path = broken / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    elif how == "empty":
        path.unlink()
    elif how == "tensor missing":
        del tensors[name]
    elif how == "another shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif how == "another name":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop(name)
    if how not in ("truncated", "empty"):
        save_file(tensors, path, metadata={"format": "pt"})
    return broken


@pytest.mark.parametrize(
    "how", ["missing directory", "truncated", "empty", "tensor missing", "another shape", "another name"]
)
async def test_wrong_weights_are_refused_and_the_old_ones_stay(
    engine: Client, versions: list[Path], tmp_path: Path, how: str
) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0}
    before = await engine.generate([1, 2, 3], **params)
    body = {"model_path": str(spoiled(versions, tmp_path, how)), "weight_version": "7"}
    status, answer = await engine.post("/update_weights_from_disk", body)
    assert (status, answer["success"]) == (400, False)
    assert "the old weights stay" in answer["message"]
    assert (await engine.info())["weight_version"] == "0"
    again = await engine.generate([1, 2, 3], **params)
    assert again["output_ids"] == before["output_ids"]
    assert again["meta_info"]["weight_versions"][0]["version"] == "0"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"max_new_tokens": -5},
        {"min_p": 1.5},
        {"colour": 3},
        {"min_new_tokens": 4},
    ],
)
async def test_sampling_parameters_are_refused_by_name(engine: Client, params: dict[str, Any]) -> None:
    status, answer = await engine.post("/generate", {"input_ids": [1, 2], "sampling_params": params})
    assert status == 400
    assert next(iter(params)) in answer["error"]["message"]


@pytest.mark.parametrize("ids", [[], [1, 640], [-1], ["1"], list(range(1, 600)) * 4])
async def test_prompts_that_cannot_be_are_refused(engine: Client, ids: list[Any]) -> None:
    status, answer = await engine.post("/generate", {"input_ids": ids})
    assert status == 400
    assert "input_ids" in answer["error"]["message"]


async def test_it_is_well(engine: Client) -> None:
    assert (await engine.get("/health"))[0] == 200
    assert (await engine.get("/health_generate"))[0] == 200
    assert (await engine.post("/flush_cache"))[0] == 200
    embedded = "max_slots" in await engine.info()
    status, answer = await engine.post("/init_weights_update_group", {})
    if embedded:  # it takes weights over process groups, and says what this call lacks
        assert (status, "master_port" in answer["error"]["message"]) == (400, True)
    else:
        assert (status, "/init_weights_update_group" in answer["error"]["message"]) == (404, True)
