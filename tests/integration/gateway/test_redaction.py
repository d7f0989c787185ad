"""`gateway.redact`: what it is given, that nothing of the original is kept, and how its failure ends."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError

from tests.fakes import Stage, staged
from tests.integration.gateway.test_clients import call as group_call
from tests.integration.gateway.test_conversations import feedback, say, sessions
from tests.tiny_tokenizer import make_model_dir, make_tokenizer
from tidegate.gateway.errors import ApiError
from tidegate.gateway.project_keys import create_key
from tidegate.gateway.turns.redaction import DEEPEST, redact_body, redact_value

SECRET = "anna@example.org"


def without_addresses(text: str) -> str:
    if "fail" in text:
        raise KeyError(text)
    return re.sub(r"[a-z]+@[a-z.]+", "(address)", text)


@pytest.fixture
def key(tmp_path: Path) -> str:
    return create_key(tmp_path / "keys.json", "me")


@pytest.fixture
async def stage(tmp_path: Path, key: str) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(
        model, keys=tmp_path / "keys.json", journal=tmp_path / "journal", conversation_idle_s=0.2,
        redact=without_addresses,
    ) as made:  # fmt: skip
        yield made


@pytest.fixture
async def user(stage: Stage, key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as made:
        yield made


def prompts(stage: Stage) -> list[str]:
    """What the engine was asked, as text."""
    tokenizer = make_tokenizer()
    return [tokenizer.decode(node.turn.delta_ids) for one in sessions(stage) for node in one.tree.nodes]


def kept(directory: Path) -> list[str]:
    """The journal's files that contain the secret."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


async def test_no_dialect_leaves_a_trace_of_what_was_redacted(
    stage: Stage, user: AsyncOpenAI, key: str, tmp_path: Path
) -> None:
    text = f"write to {SECRET} now"
    messages: list[Any] = []
    reply = await say(user, messages, text)
    await say(user, messages, "and again to " + SECRET)
    assert [len(one.tree.nodes) for one in sessions(stage)] == [2], "the quoted history is recognised"
    await user.responses.create(model="m", instructions=SECRET, input=text, metadata={"mail": SECRET})
    await user.completions.create(model="m", prompt=text)
    async with AsyncAnthropic(base_url=stage.url, api_key=key, max_retries=0) as claude:
        ask: list[Any] = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        await claude.messages.create(model="m", max_tokens=8, system=SECRET, messages=ask)
    assert len(sessions(stage)) == 4
    asked = prompts(stage)
    assert len(asked) == 5
    assert all("(address)" in one and SECRET not in one for one in asked)
    async with aiohttp.ClientSession() as http:
        row: Any = await group_call(
            http, stage, "POST", "g/episodes", key, {"task_id": "t", "metadata": {"id": SECRET}}
        )
        async with AsyncOpenAI(base_url=row["base_url"], api_key=row["api_key"], max_retries=0) as agent:
            await say(agent, [], text)
        report = {"reward": 1.0, "output": SECRET, "error": None}
        headers = {"Authorization": f"Bearer {row['finish_key']}"}
        url = f"{stage.url}/s/{row['episode']}/finish"
        async with http.post(url, json=report, headers=headers) as response:
            assert response.status == 200
    await feedback(stage, key, reply.id, "up", comment=text, correction=text)
    [group] = await stage.client.lease(1, 1, wait_s=10)
    assert SECRET not in json.dumps([group.trajectories[0].messages, group.trajectories[0].metadata])
    assert kept(tmp_path / "journal") == []


async def test_a_failing_redaction_refuses_the_call_and_records_nothing(
    stage: Stage, user: AsyncOpenAI, tmp_path: Path
) -> None:
    with pytest.raises(BadRequestError, match=r"gateway.redact failed with KeyError; nothing") as refused:
        await say(user, [], f"fail {SECRET}")
    assert refused.value.code == "redaction_failed"
    assert SECRET not in str(refused.value.body)
    assert sessions(stage) == []
    assert kept(tmp_path / "journal") == []


@pytest.mark.parametrize(
    ("field", "given", "redacted"),
    [
        ("model", "a", "a"),
        ("tools", [{"name": "a", "description": "a"}], [{"name": "a", "description": "a"}]),
        ("prompt", ["a", 7, None], ["a!", 7, None]),
        ("metadata", {"id": "a", "session_id": "s"}, {"id!": "a!", "session_id": "s"}),
        ("messages", [{"role": "a", "name": "a", "id": "a"}], [{"role": "a", "name": "a!", "id": "a"}]),
        (
            "messages",
            [{"content": [{"type": "a", "text": "a"}]}],
            [{"content": [{"type": "a", "text": "a!"}]}],
        ),
        (
            "messages",
            [{"tool_calls": [{"id": "a", "function": {"name": "a", "arguments": "a"}}]}],
            [{"tool_calls": [{"id": "a", "function": {"name": "a", "arguments": "a!"}}]}],
        ),
        (
            "messages",
            [{"content": [{"type": "tool_use", "name": "a", "input": {"name": "a", "x": [{"id": 1}]}}]}],
            [{"content": [{"type": "tool_use", "name": "a", "input": {"name!": "a!", "x!": [{"id!": 1}]}}]}],
        ),
        (
            "messages",
            [{"role": "user", "content": "a", "field": {"of": "mine"}}],
            [{"role": "user", "content": "a!"}],
        ),
        ("input", [{"type": "message", "content": "a"}], [{"type": "message", "content": "a!"}]),
    ],
)
def test_structure_is_left_alone_and_nothing_else(field: str, given: object, redacted: object) -> None:
    body = json.dumps({field: given}).encode()
    assert json.loads(redact_body(body, lambda text: text + "!")) == {field: redacted}


HIDDEN = [
    r'{"to": "anna\u0040example.org"}',
    r'{"to": ["\u0061nna@example.org"], "n": 123456789012345678901234567890, "x": 1.50}',
    r'{"anna\u0040example.org": true}',
    r'{"inner": "{\"to\": \"anna\\u0040example.org\"}"}',
    r'{"to": "anna\u0040exam',
    r"to: anna\u0040example.org",
    r"\/anna\u0040example.org\/",
]


@pytest.mark.parametrize("text", HIDDEN)
@pytest.mark.parametrize("place", ["arguments", "input", "content", "result", "responses"])
def test_escapes_of_json_hide_nothing(text: str, place: str) -> None:
    body = {
        "arguments": {"messages": [{"tool_calls": [{"function": {"name": "mail", "arguments": text}}]}]},
        "input": {"messages": [{"content": [{"type": "tool_use", "input": {"raw": text}}]}]},
        "content": {"messages": [{"role": "tool", "content": text}]},
        "result": {"messages": [{"content": [{"type": "tool_result", "content": [{"text": text}]}]}]},
        "responses": {"input": [{"type": "function_call", "arguments": text}]},
    }[place]
    redacted = redact_body(json.dumps(body).encode(), without_addresses)
    left = redacted.decode()
    for _ in range(4):  # as readers at any depth would
        assert SECRET not in left
        left = re.sub(r"\\+u([0-9a-f]{4})", lambda escape: chr(int(escape[1], 16)), left).replace("\\/", "/")
    assert "(address)" in left
    assert redact_body(redacted, without_addresses) == redacted, "redacted once, it stays"


def test_what_hides_nothing_is_kept_as_it_is_written() -> None:
    text = r'{"name": "Jos\u00e9", "n": 123456789012345678901234567890, "x": 1.50, "path": "C:\\u0040"}'
    body = {"messages": [{"tool_calls": [{"function": {"name": "f", "arguments": text}}]}]}
    assert json.loads(redact_body(json.dumps(body).encode(), without_addresses)) == body


@pytest.mark.parametrize("number", ["5551234567", "5551234567.0"])
def test_a_number_of_many_digits_is_redacted_in_arguments(number: str) -> None:
    def without_phones(text: str) -> str:
        return re.sub(r"\b\d{10}\b", "(phone)", text)

    parts = [
        {"tool_calls": [{"function": {"name": "f", "arguments": f'{{"to": {number}, "n": 3}}'}}]},
        {"content": [{"type": "tool_use", "input": {"to": json.loads(number), "n": 3}}]},
    ]
    body = redact_body(json.dumps({"messages": parts}).encode(), without_phones)
    called, used = json.loads(body)["messages"]
    given = [json.loads(called["tool_calls"][0]["function"]["arguments"]), used["content"][0]["input"]]
    assert [one["n"] for one in given] == [3, 3]
    assert all(str(one["to"]).startswith("(phone)") for one in given)


@pytest.mark.parametrize("kinds", [("text", "text", "text"), ("input_text", "text", "output_text")])
@pytest.mark.parametrize("texts", [("to anna", "@exam", "ple.org and"), ("to anna", "@", "example.org and")])
def test_a_text_split_over_content_parts_is_redacted(kinds: tuple[str, ...], texts: tuple[str, ...]) -> None:
    parts = [{"type": kind, "text": text} for kind, text in zip(kinds, texts, strict=True)]
    whole = [{"type": kinds[0], "text": "to (address) and"}]
    for body in ({"messages": [{"content": parts}]}, {"system": parts}, {"input": [{"content": parts}]}):
        redacted = json.loads(redact_body(json.dumps(body).encode(), without_addresses))
        assert json.dumps(whole) in json.dumps(redacted)
    apart = {"messages": [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    assert json.loads(redact_body(json.dumps(apart).encode(), without_addresses)) == apart


async def test_names_of_unknown_fields_leave_no_trace(
    stage: Stage, user: AsyncOpenAI, key: str, tmp_path: Path
) -> None:
    message: Any = {"role": "user", "content": "hello", SECRET: {"more": SECRET}}
    reply = await user.chat.completions.create(model="m", messages=[message])
    with pytest.raises(BadRequestError):
        await user.chat.completions.create(model="m", messages=[message], extra_body={SECRET: 1})
    await feedback(stage, key, reply.id, "up")
    [group] = await stage.client.lease(1, 1, wait_s=10)
    assert SECRET not in json.dumps([group.trajectories[0].messages, group.trajectories[0].error])
    assert kept(tmp_path / "journal") == []


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b"{}", b'{"messages": 3}'])
def test_what_is_no_request_is_left_to_the_parser(body: bytes) -> None:
    assert json_or_bytes(redact_body(body, str.upper)) == json_or_bytes(body)


def json_or_bytes(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return body


@pytest.mark.parametrize("levels", [DEEPEST + 5, 1000])
def test_depth_is_bounded(levels: int) -> None:
    nested = b'{"messages": ' + b"[" * levels + b"]" * levels + b"}"
    with pytest.raises(ApiError, match="nested more than 200 levels and cannot be redacted"):
        redact_body(nested, str.upper)


def test_a_result_that_is_no_text_is_refused() -> None:
    with pytest.raises(ApiError, match="returned NoneType, not a text"):
        redact_value(["a"], lambda _: None)  # type: ignore[arg-type,return-value]
