"""Several replies at once, and replies that follow a grammar, over HTTP with the real engine."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import pytest
import torch
from pydantic import BaseModel, Field

from tests.integration.engine.engine_http import Client, serving
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder

VOCAB = 640


class Answer(BaseModel, extra="forbid"):
    name: Annotated[str, Field(max_length=8)]
    sizes: Annotated[list[Annotated[int, Field(ge=0, le=99)]], Field(max_length=3)]
    kind: Literal["plain", "fancy"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineOptions, Model, TokenDecoder, Any]:
    directory: Path = tmp_path_factory.mktemp("model")
    plain = make_tiny_model(directory, vocab=VOCAB)
    make_tokenizer().save_pretrained(directory)
    options = EngineOptions(directory, max_slots=4, max_context=1024)
    return options, load_model(options), TokenDecoder.load(directory), plain


@pytest.fixture
async def client(parts: tuple[EngineOptions, Model, TokenDecoder, Any]) -> AsyncIterator[Client]:
    options, model, text, _ = parts
    model.cache.drop()
    async with serving(Engine(options, model, text)) as client:
        yield client


async def test_n_gives_a_list_of_the_replies_that_single_requests_would_get(client: Client) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 40}
    replies = await client.generate([1, 2, 3], rid="x", n=6, **params)  # more than there are slots
    assert [reply["meta_info"]["id"] for reply in replies] == [f"x_{i}" for i in range(6)]
    for i, reply in enumerate(replies):
        alone = await client.generate([1, 2, 3], **{**params, "sampling_seed": 40 + i})
        assert alone["output_ids"] == reply["output_ids"]
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 6
    assert isinstance(await client.generate([1, 2, 3], n=1, **params), dict)


async def test_several_replies_in_one_stream_say_whose_they_are(client: Client) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 7, "n": 3}
    whole = await client.generate([4, 5], **params)
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    async for event in client.stream([4, 5], **params):
        seen[event["index"]].append(event)
    for index, events in seen.items():
        assert len(events) > 1
        assert events[-1]["output_ids"] == whole[index]["output_ids"]
        assert events[-1]["text"] == whole[index]["text"]
        assert [event["meta_info"]["finish_reason"] is None for event in events[:-1]] == [True] * (
            len(events) - 1
        )


async def test_when_the_client_leaves_all_of_its_samples_end(client: Client) -> None:
    params = {"max_new_tokens": 1000, "ignore_eos": True, "n": 6}
    async with aiohttp.ClientSession() as leaving:
        body = {"input_ids": [1], "sampling_params": params}
        task = asyncio.create_task(leaving.post(client.url + "/generate", json=body))
        await client.until(lambda info: info["num_running"] == 4 and info["num_waiting"] == 2)
        task.cancel()
    info = await client.until(lambda info: info["num_running"] == info["num_waiting"] == 0)
    assert info["tokens_sampled"] < 4 * 1000


async def test_a_prefix_aborts_all_samples_of_a_request(client: Client) -> None:
    params = {"max_new_tokens": 1000, "ignore_eos": True, "n": 3}
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(client.generate([1], rid="job", **params))
        await client.until(lambda info: info["num_running"] == 3)
        _, body = await client.post("/abort_request", {"rid": "job"})
    assert body["aborted"] == 3
    assert [r["meta_info"]["finish_reason"]["type"] for r in await waiting] == ["abort"] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
async def test_replies_follow_a_json_schema(client: Client, temperature: float) -> None:
    params = {
        "json_schema": json.dumps(Answer.model_json_schema()),
        "temperature": temperature,
        "max_new_tokens": 400,
    }
    replies = await client.generate([1, 2, 3], n=8, sampling_seed=0, **params)
    for reply in replies:
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"
        Answer.model_validate_json(reply["text"])
    free = await client.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    assert "output_token_choices" not in free["meta_info"]


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-c]{2,4}-[0-9]{3}", r"[a-c]{2,4}-[0-9]{3}"),
        ("ebnf", 'root ::= "yes " word | "no"\nword ::= "ab" | "cd"', r"yes (ab|cd)|no"),
    ],
)
async def test_replies_follow_other_grammars(client: Client, kind: str, text: str, pattern: str) -> None:
    for reply in await client.generate([1, 2], n=6, max_new_tokens=50, ignore_eos=True, **{kind: text}):
        assert re.fullmatch(pattern, reply["text"])
        assert reply["output_ids"].count(2) == 1  # the end token ends it, whatever `ignore_eos` says
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


async def test_logprobs_under_a_grammar_are_over_allowed_tokens_and_forced_ones_are_reported(
    client: Client, parts: tuple[EngineOptions, Model, TokenDecoder, Any]
) -> None:
    plain = parts[3]
    reply = await client.generate([1, 2, 3], regex=r"ab[0-9]", temperature=0.7, max_new_tokens=20)
    ids, meta = reply["output_ids"], reply["meta_info"]
    choices, logprobs = meta["output_token_choices"], [one[0] for one in meta["output_token_logprobs"]]
    assert len(choices) == len(ids) == len(logprobs)
    assert choices[-1] == 1  # the end token, forced
    assert [logprob for logprob, count in zip(logprobs, choices, strict=True) if count == 1 and logprob] == []
    digit = next(i for i, count in enumerate(choices) if count == 10)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[1, 2, 3, *ids[:digit]]])).logits[0, -1].double() / 0.7
    tokenizer = parts[2].tokenizer
    allowed = [one for one in range(len(tokenizer)) if re.fullmatch("[0-9]", tokenizer.decode([one]))]
    expected = logits[ids[digit]] - torch.logsumexp(logits[allowed], 0)
    assert abs(float(expected) - logprobs[digit]) < 1e-4


async def test_a_grammar_keeps_its_state_after_a_retraction(client: Client) -> None:
    params = {"regex": r"[a-z]{200}", "sampling_seed": 3, "max_new_tokens": 300}
    undisturbed = await client.generate([1, 2], **params)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(client.generate([1, 2], **params))
        before = (await client.info())["tokens_sampled"]
        await client.until(lambda info: info["tokens_sampled"] > before + 5)
        await client.post("/pause_generation", {"mode": "retract"})
        await client.post("/continue_generation")
    reply = await waiting
    assert reply["output_ids"] == undisturbed["output_ids"]
    assert re.fullmatch(r"[a-z]{200}", reply["text"])


async def test_a_context_that_ends_first_says_length(client: Client) -> None:
    reply = await client.generate([1], regex=r"[a-z]{500}", max_new_tokens=5)
    assert reply["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"json_schema": "{"}, "sampling_params.json_schema"),
        ({"json_schema": '{"type": "objet"}'}, "objet"),
        ({"regex": "(ab"}, "unclosed group"),
        ({"ebnf": 'root ::= "a" x'}, "'x' not found"),
        ({"json_schema": "{}", "regex": "a"}, "json_schema is given too"),
    ],
)
async def test_grammars_that_cannot_be_read_are_refused(
    client: Client, params: dict[str, str], words: str
) -> None:
    status, body = await client.post("/generate", {"input_ids": [1], "sampling_params": params})
    assert status == 400
    assert words in body["error"]["message"]
    assert (await client.info())["num_waiting"] == 0


async def test_without_llguidance_a_grammar_is_refused_with_what_to_install(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"input_ids": [1], "sampling_params": {"regex": "a+"}}
    status, reply = await client.post("/generate", body)
    assert status == 400
    assert "sampling_params.regex" in reply["error"]["message"]
    assert "install Tidegate's extra 'grammar'" in reply["error"]["message"]
    assert len((await client.generate([1], max_new_tokens=3, ignore_eos=True))["output_ids"]) == 3


async def test_a_grammar_that_fails_midway_fails_its_own_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever makes a matcher refuse a token: its request gets an error, the others go on."""
    from tidegate.engine.requests.grammar import Grammar

    monkeypatch.setattr(Grammar, "allowed", lambda self, vocab: torch.zeros(vocab, dtype=bool).numpy())
    body = {"input_ids": [1], "sampling_params": {"regex": "(zq){9}", "ignore_eos": True}}
    async with asyncio.TaskGroup() as group:
        other = group.create_task(client.generate([1, 2], max_new_tokens=60, ignore_eos=True))
        status, reply = await client.post("/generate", body)
        assert (await client.info())["num_running"] <= 1
    assert status == 500
    assert "cannot follow its grammar" in reply["error"]["message"]
    assert "<state>" not in reply["error"]["message"]
    assert len((await other)["output_ids"]) == 60


async def test_penalties_and_min_p_over_http(client: Client) -> None:
    """With a heavy presence penalty greedy decoding does not repeat itself; without, it may."""
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    free = await client.generate([1, 2, 3], **params)
    one_each = await client.generate([1, 2, 3], presence_penalty=2, frequency_penalty=2, **params)
    assert one_each["output_ids"] != free["output_ids"]
    assert len(set(one_each["output_ids"])) > len(set(free["output_ids"]))
    greedy = await client.generate([1, 2, 3], min_p=1, **{**params, "temperature": 1})
    assert greedy["output_ids"] == free["output_ids"]
