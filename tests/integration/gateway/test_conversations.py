"""Plain calls with a project key: the conversation that each belongs to, feedback, and how they end."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI

from tests.fakes import Fault, Stage, eventually, staged
from tests.integration.gateway.test_clients import call as group_call
from tests.integration.gateway.test_journal import killed
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.clients import conversations, notes
from tidegate.gateway.http.app import collect
from tidegate.gateway.project_keys import create_key, revoke_key
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.types import Group, Outcome

IDLE_S, WINDOW_S = 0.2, 600.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(keys: Path) -> str:
    return create_key(keys, "me")


@pytest.fixture
def options(keys: Path, key: str) -> dict[str, Any]:
    return {"keys": keys, "conversation_idle_s": IDLE_S, "feedback_window_s": WINDOW_S}


@pytest.fixture
async def stage(tmp_path: Path, options: dict[str, Any]) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, journal=tmp_path / "journal", **options) as made:
        yield made


@pytest.fixture
async def user(stage: Stage, key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as made:
        yield made


async def say(user: AsyncOpenAI, messages: list[Any], text: str = "hello", **more: Any) -> Any:
    """Adds a user's message to a conversation, and the reply; returns the reply."""
    messages.append({"role": "user", "content": text})
    reply = await user.chat.completions.create(model="m", messages=messages, **more)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    return reply


async def feedback(stage: Stage, key: str, about: str, value: object, **more: object) -> Any:
    """Returns the response, or the status and message of a refusal."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"id": about, "value": value, **more}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{stage.url}/v1/feedback", json=body, headers=headers) as response,
    ):
        row = await response.json()
        return row if response.status < 400 else (response.status, row["error"]["message"])


def sessions(stage: Stage) -> list[GatewaySession]:
    return stage.gateway.sessions.all()


async def leased(stage: Stage) -> Group:
    [group] = await stage.client.lease(1, 1, wait_s=10)
    return group


async def test_a_plain_client_is_trained_on_after_feedback(stage: Stage, user: AsyncOpenAI, key: str) -> None:
    messages: list[Any] = []
    await say(user, messages)
    reply = await say(user, messages, "and now?")
    assert [len(one.tree.nodes) for one in sessions(stage)] == [2], "one conversation, of two turns"
    answer = await feedback(stage, key, reply.id, "up")
    group = await leased(stage)
    assert group.id == f"me.{answer['group']}"
    [trajectory] = group.trajectories
    assert (group.client, trajectory.outcome, trajectory.reward) == ("me", Outcome.COMPLETED, 1.0)
    assert [turn.parent for turn in trajectory.turns] == [None, 0], "the second extends the recorded ids"
    assert trajectory.reward_parts == {"feedback": 1.0}
    status, message = await feedback(stage, key, reply.id, "down")
    assert status == 404
    assert "or it has ended" in message


async def test_conversations_with_equal_beginnings_stay_apart(stage: Stage, user: AsyncOpenAI) -> None:
    """Equal words and equal replies: each continuation goes to one that still ends in the quoted reply."""
    one: list[Any] = []
    other: list[Any] = []
    await say(user, one)
    await say(user, other)
    assert one == other
    await say(user, one, "the first goes on")
    await say(user, other, "the second goes on")
    await say(user, one, "and on")
    assert sorted(len(session.tree.nodes) for session in sessions(stage)) == [2, 3]


async def test_a_named_call_belongs_to_the_conversation_of_that_name(stage: Stage, user: AsyncOpenAI) -> None:
    named = {"extra_headers": {"x-tidegate-session": "c1"}}
    await asyncio.gather(*(say(user, [], f"part {number}", **named) for number in range(4)))
    assert [len(session.tree.nodes) for session in sessions(stage)] == [4], "simultaneous calls begin it once"
    await say(user, [], "by the body", metadata={"session_id": "c1"})
    await say(user, [], "another", metadata={"session_id": "c2"})
    assert sorted(len(session.tree.nodes) for session in sessions(stage)) == [1, 5]
    with pytest.raises(APIStatusError, match="1 to 200 characters") as refused:
        await say(user, [], "long", metadata={"session_id": "c" * 201})
    assert refused.value.status_code == 400


async def test_all_dialects_continue_a_conversation(stage: Stage, user: AsyncOpenAI, key: str) -> None:
    first = await user.responses.create(model="m", input="hello")
    second = await user.responses.create(model="m", input="go on", previous_response_id=first.id)
    assert [len(one.tree.nodes) for one in sessions(stage)] == [2]
    history: list[Any] = [{"role": "user", "content": "hello"}, *first.output]
    await user.responses.create(model="m", input=[*history, {"role": "user", "content": "by history"}])
    assert [len(one.tree.nodes) for one in sessions(stage)] == [3]
    assert "group" in await feedback(stage, key, second.id, 0.5)
    with pytest.raises(APIStatusError, match="there is no response 'no'"):
        await user.responses.create(model="m", input="hello", previous_response_id="no")
    async with AsyncAnthropic(base_url=stage.url, api_key=key, max_retries=0) as claude:
        ask: list[Any] = [{"role": "user", "content": "another"}]
        reply = await claude.messages.create(model="m", max_tokens=8, messages=ask)
        ask += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "go on"}]
        last = await claude.messages.create(model="m", max_tokens=8, messages=ask)
        assert [model.id async for model in claude.models.list()] == ["policy"]
    assert sorted(len(one.tree.nodes) for one in sessions(stage)) == [2, 3]
    assert "group" in await feedback(stage, key, last.id, "down")
    done = await user.completions.create(model="m", prompt="raw")
    assert "group" in await feedback(stage, key, done.id, "down")
    assert len(sessions(stage)) == 3


async def test_a_retry_of_a_first_call_begins_no_second_conversation(stage: Stage, user: AsyncOpenAI) -> None:
    first = await say(user, [])
    again = await say(user, [], extra_headers={"x-stainless-retry-count": "1"})
    assert again.id == first.id, "the recorded reply"
    assert len(sessions(stage)) == 1
    await say(user, [])
    assert len(sessions(stage)) == 2, "the same words, not marked as a retry"


async def test_a_retry_finds_its_conversation_after_another_with_the_same_words_has_ended(
    stage: Stage, user: AsyncOpenAI, key: str
) -> None:
    ended, running = await say(user, []), await say(user, [])
    await feedback(stage, key, ended.id, "up")
    await leased(stage)
    async with asyncio.timeout(10):
        while (await feedback(stage, key, ended.id, "up"))[0] != 404:  # noqa: ASYNC110 - forgotten
            await asyncio.sleep(0.01)
    again = await say(user, [], extra_headers={"x-stainless-retry-count": "1"})
    assert again.id == running.id


async def test_feedback_may_come_before_the_reply_is_complete(
    stage: Stage, user: AsyncOpenAI, key: str, keys: Path
) -> None:
    other = create_key(keys, "other")
    stage.gateway.keys.reload()
    stage.say("One, two.")
    stage.engine.stream_delay = asyncio.Event()
    ask: list[Any] = [{"role": "user", "content": "hello"}]
    stream = await user.chat.completions.create(model="m", messages=ask, stream=True)
    reply = await anext(stream)
    assert (await feedback(stage, other, reply.id, "down"))[0] == 404, "another key's"
    for more in ({"reply_only": True}, {"comment": "c"}, {"correction": "c"}):
        status, why = await feedback(stage, key, reply.id, "down", **more)
        assert (status, "the reply is not complete" in why) == (409, True)
    assert "group" in await feedback(stage, key, reply.id, "up")
    stage.engine.stream_delay.set()
    async for _ in stream:
        pass
    trajectory = (await leased(stage)).trajectories[0]
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 1)


async def test_a_key_that_is_revoked_ends_what_its_client_may_do_and_keeps_what_it_did(
    stage: Stage, user: AsyncOpenAI, key: str, keys: Path
) -> None:
    messages: list[Any] = []
    reply = await say(user, messages)
    await feedback(stage, key, reply.id, "up")
    revoke_key(keys, "me")
    stage.gateway.keys.reload()
    with pytest.raises(APIStatusError) as refused:
        await say(user, messages, "more")
    assert refused.value.status_code == 401
    assert (await feedback(stage, key, reply.id, "down"))[0] == 401
    trajectory = (await leased(stage)).trajectories[0]
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 1)


async def test_feedback_is_for_the_conversation_or_one_reply_and_a_name_replaces(
    stage: Stage, user: AsyncOpenAI, key: str
) -> None:
    messages: list[Any] = []
    first = await say(user, messages, metadata={"session_id": "c1"})
    await say(user, messages, "more", metadata={"session_id": "c1"})
    assert "group" in await feedback(stage, key, first.id, 0.25, name="tone", reply_only=True)
    assert "group" in await feedback(stage, key, "c1", "up")
    assert "group" in await feedback(stage, key, "c1", "down")
    assert "group" in await feedback(stage, key, first.id, 3, name="judge")
    [trajectory] = (await leased(stage)).trajectories
    assert trajectory.reward == 3.0
    assert trajectory.reward_parts == {"feedback": 0.0, "judge": 3.0}
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0]


@pytest.mark.parametrize(
    ("about", "value", "more", "status", "why"),
    [
        ("no", "up", {}, 404, "there is no reply and no conversation 'no' of this key"),
        ("c1", "up", {"reply_only": True}, 400, "needs the reply's id"),
        (
            "c1",
            "great",
            {},
            400,
            "value = 'great': Input should be a valid number, or Input should be 'up' or",
        ),
        ("c1", True, {}, 400, "value = True: Input should be a valid number, or Input should be 'up' or 'do"),
        ("c1", None, {}, 400, "value = None: Input should be a valid number, or Input should be 'up' or 'do"),
        ("", "up", {}, 400, "id = '': String should have at least 1 character"),
        (7, "up", {}, 400, "id = 7: Input should be a valid string"),
        (
            "c1",
            "up",
            {"remark": "x"},
            400,
            "remark: Extra inputs are not permitted; the fields are id, value, ",
        ),
        ("c1", "up", {"coment": "x"}, 400, "not permitted; did you mean 'comment'?; the fields are id, "),
        ("c1", "up", {"reply_only": "perhaps"}, 400, "reply_only = 'perhaps': Input should be a valid bool"),
    ],
)
async def test_wrong_feedback_is_refused_and_loses_nothing(
    stage: Stage,
    user: AsyncOpenAI,
    key: str,
    about: Any,
    value: object,
    more: dict[str, Any],
    status: int,
    why: str,
) -> None:
    await say(user, [], metadata={"session_id": "c1"})
    refused = await feedback(stage, key, about, value, **more)
    assert refused[0] == status
    assert why in refused[1]
    assert (sessions(stage)[0].rewards, sessions(stage)[0].turn_rewards) == ({}, {})


async def test_a_key_reaches_its_own_conversations_only(
    stage: Stage, user: AsyncOpenAI, key: str, keys: Path
) -> None:
    other = create_key(keys, "other")
    stage.gateway.keys.reload()
    messages: list[Any] = []
    reply = await say(user, messages, metadata={"session_id": "c1"})
    for about in (reply.id, "c1"):
        assert (await feedback(stage, other, about, "down"))[0] == 404
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=other, max_retries=0) as stranger:
        await say(stranger, list(messages), "go on", metadata={"session_id": "c1"})
        await say(stranger, list(messages), "go on")
    assert sorted((one.client, len(one.tree.nodes)) for one in sessions(stage)) == [
        ("me", 1), ("other", 1), ("other", 1),
    ]  # fmt: skip
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="no", max_retries=0) as nobody:
        with pytest.raises(APIStatusError) as refused:
            await say(nobody, [])
    assert refused.value.status_code == 401
    assert "is no project key of this gateway" in refused.value.message
    assert "`tidegate keys create NAME` adds one to the file gateway.keys" in refused.value.message
    assert "`tidegate keys create NAME` adds one" in (await feedback(stage, "no", "c1", "up"))[1]


async def test_tokens_are_counted_without_beginning_a_conversation(stage: Stage, key: str) -> None:
    ask: list[Any] = [{"role": "user", "content": "hello"}]
    async with AsyncAnthropic(base_url=stage.url, api_key=key, max_retries=0) as claude:
        counted = await claude.messages.count_tokens(model="m", messages=ask)
        assert sessions(stage) == []
        reply = await claude.messages.create(model="m", max_tokens=8, messages=ask)
    assert counted.input_tokens == reply.usage.input_tokens
    [gauge] = [one for one in collect(stage.gateway) if one.name == "tidegate_gateway_conversations"]
    assert [sample.value for sample in gauge.samples] == [1]


async def test_comments_and_corrections_are_kept_with_the_conversation(
    stage: Stage, user: AsyncOpenAI, key: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    messages: list[Any] = []
    first = await say(user, messages, "one")
    last = await say(user, messages, "two")
    await feedback(stage, key, first.id, "down", name="a", comment="wrong", correction="1, of course")
    await feedback(stage, key, last.id, "down", name="b", correction="a draft")
    await feedback(stage, key, last.id, 0.5, name="b", correction="2")
    copy = killed(tmp_path, "after")
    group = await leased(stage)
    expected = {
        "feedback": {
            "0.a": {
                "comment": "wrong",
                "correction": [messages[0], {"role": "assistant", "content": "1, of course"}],
            },
            "1.b": {"correction": [*messages[:3], {"role": "assistant", "content": "2"}]},
        }
    }
    metadata = group.trajectories[0].metadata
    received = metadata["received"]
    assert [(one["name"], one["value"], one["reply"]) for one in received] == [
        ("a", 0, None),
        ("b", 0.5, None),
    ]
    assert metadata == expected | {"received": received}
    assert all(0 <= one["after_s"] < 60 for one in received)
    assert group.trajectories[0].reward == 0.5
    async with staged(tmp_path / "tiny", journal=copy, **options) as after:
        assert (await leased(after)).trajectories[0].metadata == metadata


async def test_too_many_comments_are_refused_and_change_nothing(
    stage: Stage, user: AsyncOpenAI, key: str
) -> None:
    reply = await say(user, [])
    for number in range(notes.MAX_NOTES):
        await feedback(stage, key, reply.id, 0, name=f"n{number}", comment="c")
    [session] = sessions(stage)
    before = dict(session.metadata), dict(session.rewards)
    refused = [
        await feedback(stage, key, reply.id, 1, name="more", comment="c"),
        await feedback(stage, key, reply.id, 1, comment="c" * 10_001),
        await feedback(stage, key, reply.id, 1, correction=""),
    ]
    assert [status for status, _ in refused] == [400] * 3, refused
    assert "from 16 feedbacks at most" in refused[0][1]
    assert (dict(session.metadata), dict(session.rewards)) == before


async def test_without_feedback_a_conversation_ends_unrewarded(
    tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    model = make_model_dir(tmp_path / "tiny")
    async with (
        staged(model, **options | {"feedback_window_s": 0.1}) as stage,
        AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as user,
    ):
        messages: list[Any] = []
        await say(user, messages)
        await eventually(lambda: sessions(stage)[0].trajectory is not None)
        [session] = sessions(stage)
        assert session.trajectory is not None
        assert (session.trajectory.outcome, session.trajectory.reward) == (Outcome.UNREWARDED, None)
        assert stage.gateway.metrics.outcomes["unrewarded"] == 1
        assert stage.gateway.groups.entries() == []
        [row] = await stage.client.list_groups()
        assert (row.client, row.outcome, row.unended) == ("me", "unrewarded", 0)
        await say(user, messages, "later")
        assert [one.outcome for one in await stage.client.list_groups()] == ["unrewarded", None]
        assert len(sessions(stage)) == 2, "what continues it is a new conversation"


async def test_a_conversation_does_not_end_while_a_call_runs(
    stage: Stage, user: AsyncOpenAI, key: str
) -> None:
    messages: list[Any] = []
    reply = await say(user, messages)
    stage.engine.faults.append(Fault("hold"))
    running = asyncio.create_task(say(user, messages, "more"))
    await stage.engine.until(lambda: len(stage.engine.requests) == 2)
    assert "group" in await feedback(stage, key, reply.id, "up")
    await asyncio.sleep(2 * (IDLE_S + conversations.SWEEP_S))  # more than enough to end it
    assert sessions(stage)[0].closed is None
    stage.engine.release()
    await running
    assert len((await leased(stage)).trajectories[0].turns) == 2


async def test_exempt_turns_are_not_trained_on(stage: Stage, user: AsyncOpenAI, key: str) -> None:
    messages: list[Any] = []
    await say(user, messages, extra_headers={"x-tidegate-train": "no"})
    reply = await say(user, messages, "more")
    await feedback(stage, key, reply.id, "up")
    [trajectory] = (await leased(stage)).trajectories
    assert [turn.exempt is None for turn in trajectory.turns] == [False, True]


async def test_too_many_conversations_are_refused_for_now(
    stage: Stage, user: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 1)
    messages: list[Any] = []
    await say(user, messages)
    with pytest.raises(APIStatusError, match="1 conversations have not ended") as refused:
        await say(user, [])
    assert refused.value.status_code == 429
    await say(user, messages, "the first goes on")


async def test_a_restarted_gateway_continues_conversations_and_has_their_feedback(
    stage: Stage, user: AsyncOpenAI, key: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = options | {"conversation_idle_s": 1000.0}
    one: list[Any] = []
    named: list[Any] = []
    reply = await say(user, one)
    await say(user, named, "other words", metadata={"session_id": "c1"})
    assert "group" in await feedback(stage, key, "c1", "up")
    copy = killed(tmp_path, "after")
    async with (
        staged(tmp_path / "tiny", journal=copy, **options) as again,
        AsyncOpenAI(base_url=f"{again.url}/v1", api_key=key, max_retries=0) as later,
    ):
        retried = await say(later, [], extra_headers={"x-stainless-retry-count": "1"})
        assert retried.id == reply.id
        await say(later, one, "go on")
        await say(later, named, "go on", metadata={"session_id": "c1"})
        assert [len(session.tree.nodes) for session in sessions(again)] == [2, 2]
        assert sessions(again)[1].rewards == {"feedback": 1.0}
        assert "group" in await feedback(again, key, reply.id, "down")
        last = Path(shutil.copytree(copy, tmp_path / "last"))
    options["conversation_idle_s"] = IDLE_S
    async with staged(tmp_path / "tiny", journal=last, **options) as ended:
        rewards = [(await leased(ended)).rewards() for _ in range(2)]
        assert sorted(rewards) == [[0.0], [1.0]]


async def test_a_conversation_that_was_finished_before_a_crash_is_sealed_after_it(
    stage: Stage,
    user: AsyncOpenAI,
    key: str,
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(stage.gateway, "seal", never)
    reply = await say(user, [])
    await feedback(stage, key, reply.id, "up")
    await eventually(lambda: sessions(stage)[0].trajectory is not None)
    copy = killed(tmp_path, "after")
    async with staged(tmp_path / "tiny", journal=copy, **options) as again:
        assert (await leased(again)).rewards() == [1.0]


async def test_conversations_take_no_room_from_groups(stage: Stage, user: AsyncOpenAI, key: str) -> None:
    await say(user, [])
    async with aiohttp.ClientSession() as http:
        for number in range(stage.gateway.options.max_client_groups):
            row = await group_call(http, stage, "POST", f"g{number}/episodes", key, {"task_id": "t"})
            assert isinstance(row, dict), row
