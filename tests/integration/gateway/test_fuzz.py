"""Random bodies and histories: no 5xx, every reply is recorded; and the driver detects planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fuzzing.drive import CLIENT_STORIES, WORKER_STORIES, Plan, drive, told
from tests.fuzzing.stories import Failure
from tests.tiny_tokenizer import TEMPLATES, make_model_dir
from tidegate.gateway.attempts import AttemptQueue
from tidegate.gateway.dialects import chat
from tidegate.gateway.errors import ApiError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.sessions.model_calls import SessionModelCalls
from tidegate.gateway.sessions.tree import TurnTree
from tidegate.gateway.turns.request_reader import parse


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "tiny")


@pytest.mark.parametrize("template", ["mistral", "qwen3"])
async def test_no_body_makes_the_gateway_fail(tmp_path: Path, template: str) -> None:
    model = make_model_dir(tmp_path / "tiny", template)
    seen = await drive(model, Plan(seed=1, template=template, count=8))
    assert seen["200"] > 100
    assert seen["400"] > 50


def worker_plan() -> Plan:
    return Plan(seed=1, template="qwen2", count=1, first=WORKER_STORIES - 1, cases=200)


async def test_no_call_of_a_worker_makes_the_gateway_fail(tiny: Path) -> None:
    seen = await drive(tiny, worker_plan())
    assert seen["200"] > 40
    assert seen["400"] > 40
    assert seen["410"] > 10


async def test_an_attempt_that_is_given_twice_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(self: AttemptQueue, *arguments: Any, **named: Any) -> Any:
        given = await original(self, *arguments, **named)
        for session, _ in given:
            self.add(session)
        return given

    original = AttemptQueue.take
    monkeypatch.setattr(AttemptQueue, "take", take)
    with pytest.raises(Failure, match="was given twice"):
        await drive(tiny, worker_plan())


@pytest.mark.parametrize("depth", [50, 119, 120, 199, 255, 500, 1000])
@pytest.mark.parametrize("kind", ["[%s]", '{"a":%s}'])
def test_what_could_not_be_written_again_is_refused(depth: int, kind: str) -> None:
    """orjson reads deeper than it writes; what came may stand within a reply, which is deeper still."""
    start, end = kind.split("%s")
    body = b'{"tools": ' + (start * depth + "1" + end * depth).encode() + b"}"
    if depth < 120:
        payload = parse(body)
        assert orjson.dumps({"response": {"output": [payload]}})
        return
    with pytest.raises(ApiError, match=r"nested more than 120 levels|nested too deeply"):
        parse(body)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("template", sorted(TEMPLATES))
async def test_ten_thousand_cases(tmp_path: Path, template: str) -> None:
    model = make_model_dir(tmp_path / "tiny", template)
    await drive(model, Plan(seed=2, template=template, count=250 // len(TEMPLATES)))


async def test_a_body_that_makes_the_gateway_fail_is_found_and_shrunk(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(payload: Any, *rest: Any) -> Any:
        if payload.get("max_tokens") == 5:
            raise RuntimeError("planted")
        return original(payload, *rest)

    original = chat.read
    monkeypatch.setattr(chat, "read", read)
    with pytest.raises(Failure, match="failed inside") as caught:
        await drive(tiny, Plan(seed=1, template="qwen2", count=20))
    assert caught.value.case is not None
    assert orjson.loads(caught.value.case.body) == {"max_tokens": 5}
    assert "again: python -m tests.fuzzing --template qwen2 --seed 1 --story " in told(caught.value)


async def test_a_reply_that_is_not_recorded_as_it_was_read_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(self: chat.ChatEvents, choice: int, part: Any) -> bytes:
        return b"" if "r" in str(part) else original(self, choice, part)

    original = chat.ChatEvents.part
    monkeypatch.setattr(chat.ChatEvents, "part", part)
    with pytest.raises(Failure, match="recorded"):
        await drive(tiny, Plan(seed=1, template="qwen2", count=20))


async def test_a_reply_that_does_not_count_as_delivered_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TurnTree, "mark_delivered", lambda *_: None)
    with pytest.raises(Failure, match="does not count as delivered"):
        await drive(tiny, Plan(seed=1, template="qwen2", count=1))


async def test_an_idempotency_key_that_is_not_honoured_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionModelCalls, "find_repeated", lambda *_: None)
    with pytest.raises(Failure, match="Idempotency-Key"):
        await drive(tiny, Plan(seed=1, template="qwen2", count=20))


async def test_feedback_that_is_accepted_and_not_recorded_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def post_reward(*_: Any) -> None:
        """Forgets it."""

    monkeypatch.setattr(Gateway, "post_reward", post_reward)
    with pytest.raises(Failure, match=r"accepted feedback .* is not recorded"):
        await drive(tiny, Plan(seed=1, template="qwen2", count=4 * CLIENT_STORIES, first=4))
