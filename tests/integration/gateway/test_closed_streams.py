"""Streams that clients close: the delivered part is a turn, which a history with that part extends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.fakes import Fault, Stage, eventually, logprob_of, staged
from tests.integration.gateway.chat_calls import TOOLS
from tests.integration.gateway.sdk_stage import CALL, TASK, finished, opened, stage
from tests.integration.gateway.test_journal import killed
from tests.journal_copy import copy_journal
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.client import SessionAccess
from tidegate.trainer.batch.rows import rows_of
from tidegate.turn import CLIENT_CLOSED, VersionSpan
from tidegate.types import Sampling, Trajectory

__all__ = ["stage"]
REPLY = "Thought: I add. Observation: 42 and more"
READ = 20
"""Tokens that are delivered before the client closes the stream."""
USER: dict[str, Any] = {"role": "user", "content": "1+2?"}
AND: dict[str, Any] = {"role": "user", "content": "and now?"}


class Client:
    """The SDKs of one session, wherever the gateway serves."""

    def __init__(self, stage: Stage, access: SessionAccess, stack: contextlib.AsyncExitStack) -> None:
        root = f"{stage.url}/s/{access.session_id}"
        self._stack = stack
        self.openai = AsyncOpenAI(base_url=f"{root}/v1", api_key=access.api_key, max_retries=0)
        self.anthropic = AsyncAnthropic(base_url=root, api_key=access.api_key, max_retries=0)

    async def __aenter__(self) -> Client:
        await self._stack.enter_async_context(self.openai)
        await self._stack.enter_async_context(self.anthropic)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def client_of(stage: Stage, access: SessionAccess) -> AsyncIterator[Client]:
    async with contextlib.AsyncExitStack() as stack, Client(stage, access, stack) as client:
        yield client


async def read_until(texts: AsyncIterator[str | None], end: str) -> str:
    said = ""
    async for text in texts:
        said += text or ""
        if said.endswith(end):
            return said
    raise AssertionError(f"the stream ended after {said!r}")


async def by_chat(client: Client, end: str, **options: Any) -> str:
    made = await client.openai.chat.completions.create(model="m", messages=[USER], stream=True, **options)
    async with made as stream:
        return await read_until((chunk.choices[0].delta.content async for chunk in stream), end)


async def chat_again(client: Client, said: str) -> None:
    history: list[Any] = [USER, {"role": "assistant", "content": said}, AND]
    await client.openai.chat.completions.create(model="m", messages=history)


async def by_completions(client: Client, end: str) -> str:
    async with await client.openai.completions.create(model="m", prompt="1+2?", stream=True) as stream:
        return await read_until((chunk.choices[0].text async for chunk in stream), end)


async def completions_again(client: Client, said: str) -> None:
    await client.openai.completions.create(model="m", prompt=f"1+2?{said}\nand now?")


async def by_messages(client: Client, end: str) -> str:
    asked: Any = [USER]
    async with client.anthropic.messages.stream(model="m", max_tokens=99, messages=asked) as stream:
        return await read_until(stream.text_stream, end)


async def messages_again(client: Client, said: str) -> None:
    history: Any = [USER, {"role": "assistant", "content": said}, AND]
    await client.anthropic.messages.create(model="m", max_tokens=99, messages=history)


async def by_responses(client: Client, end: str) -> str:
    async with await client.openai.responses.create(model="m", input="1+2?", stream=True) as stream:
        texts = (event.delta async for event in stream if event.type == "response.output_text.delta")
        return await read_until(texts, end)


async def responses_again(client: Client, said: str) -> None:
    history: Any = [USER, {"role": "assistant", "content": said}, AND]
    await client.openai.responses.create(model="m", input=history)


LISTED = Sampling(top_logprobs=2)
"""With it, each token is recorded with likeliest ids that begin with itself."""
Ask = Callable[[Client, str], Awaitable[Any]]
DIALECTS = pytest.mark.parametrize(
    ("ask", "again"),
    [
        (by_chat, chat_again),
        (by_completions, completions_again),
        (by_messages, messages_again),
        (by_responses, responses_again),
    ],
    ids=["chat", "completions", "messages", "responses"],
)


def spoken(stage: Stage, text: str = REPLY, read: int = READ) -> tuple[list[int], str]:
    """Script a reply of which `read` tokens come; their ids and text."""
    ids = stage.say(text)[:read]
    stage.engine.faults.append(Fault("pause", read))
    return ids, stage.gateway.renderer.decode(ids)


def assert_trained_once(trajectory: Trajectory) -> None:
    rows = rows_of(trajectory, 1.0)
    for turn in trajectory.turns:
        assert turn.top_ids is not None
        assert turn.top_ids.reshape(-1, 2)[:, 0].tolist() == turn.output_ids.tolist(), "its own list"
    assert sum(row.trained for row in rows) == trajectory.sampled_tokens()
    for row in rows:
        assert (row.versions[row.mask] == 0).all()


@DIALECTS
async def test_a_stream_that_is_closed_is_a_turn_and_is_extended(stage: Stage, ask: Ask, again: Ask) -> None:
    access, _ = await opened(stage, sampling=LISTED)
    ids, text = spoken(stage)
    async with client_of(stage, access) as client:
        assert await ask(client, text) == text
        await again(client, text)
    assert stage.engine.aborted == [stage.engine.requests[0]["rid"]]
    trajectory = await finished(stage, access)
    closed, after = trajectory.turns
    assert closed.output_ids.tolist() == ids
    assert closed.logprobs.tolist() == [np.float32(logprob_of(one, at)) for at, one in enumerate(ids)]
    assert closed.version_spans == (VersionSpan(0, 0, READ),)
    assert (closed.finish_reason, closed.delivered, closed.branch) == (CLIENT_CLOSED, True, None)
    assert (after.parent, after.branch) == (0, None)
    assert trajectory.prompt_ids(after).tolist()[: len(closed.delta_ids) + READ] == [
        *closed.delta_ids.tolist(),
        *ids,
    ]
    assert_trained_once(trajectory)
    assert stage.gateway.metrics.client_closed_turns == 1
    assert stage.gateway.metrics.undelivered_turns == 0


@DIALECTS
async def test_a_shorter_quote_is_continued_and_the_rest_is_trained_too(
    stage: Stage, ask: Ask, again: Ask
) -> None:
    """The client stops at a word of its own; more was on its way to it."""
    access, _ = await opened(stage, sampling=LISTED)
    ids, text = spoken(stage)
    quoted = text[: text.index("Observ")].rstrip()
    async with client_of(stage, access) as client:
        await ask(client, text)
        await again(client, quoted)
    trajectory = await finished(stage, access)
    closed, rest, after = trajectory.turns
    decode = stage.gateway.renderer.decode
    assert decode(closed.output_ids.tolist()).strip() == quoted
    assert [*closed.output_ids.tolist(), *rest.output_ids.tolist()] == ids
    assert (rest.parent, len(rest.delta_ids), rest.delivered) == (0, 0, True)
    assert str(rest.branch).startswith("unquoted")
    assert after.parent == 0
    assert "Observ" not in decode(trajectory.prompt_ids(after).tolist())
    assert [turn.version_spans for turn in (closed, rest)] == [
        (VersionSpan(0, 0, len(closed.output_ids)),),
        (VersionSpan(0, 0, len(rest.output_ids)),),
    ]
    assert rest.started == pytest.approx(closed.started + closed.seconds, abs=1e-6), "no time counts twice"
    assert closed.seconds / rest.seconds == pytest.approx(len(closed.output_ids) / len(rest.output_ids))
    assert_trained_once(trajectory)


async def test_a_stream_that_is_cancelled_after_a_tool_call(stage: Stage) -> None:
    access, _ = await opened(stage, sampling=LISTED)
    ids = stage.say(f"Let me see. {CALL}\nIt must be 3, I think")
    whole = len(stage.gateway.renderer.encode(f"Let me see. {CALL}"))
    stage.engine.faults.append(Fault("pause", whole + 4))
    async with client_of(stage, access) as client:
        made = await client.openai.chat.completions.create(
            model="m", messages=[USER], tools=TOOLS, stream=True
        )
        calls: list[Any] = []
        async with made as stream:
            async for chunk in stream:
                calls += chunk.choices[0].delta.tool_calls or []
                if len(calls) == 2:
                    break
        call = {"id": calls[0].id, "type": "function", "function": {"name": "calculator"}}
        call["function"]["arguments"] = calls[1].function.arguments
        history: list[Any] = [USER, {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}]
        history.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        await client.openai.chat.completions.create(model="m", messages=history, tools=TOOLS)
    trajectory = await finished(stage, access)
    assert trajectory.turns[0].output_ids.tolist() == ids[:whole]
    assert [turn.parent for turn in trajectory.turns if not str(turn.branch).startswith("unquoted")] == [
        None,
        0,
    ]
    assert_trained_once(trajectory)


@DIALECTS
async def test_a_session_that_ends_with_a_closed_stream(stage: Stage, ask: Ask, again: Ask) -> None:
    access, _ = await opened(stage, sampling=LISTED)
    ids, text = spoken(stage)
    async with client_of(stage, access) as client:
        await ask(client, text)
        trajectory = await finished(stage, access)
    assert [turn.output_ids.tolist() for turn in trajectory.turns] == [ids]
    assert trajectory.outcome == "completed"
    assert trajectory.messages[-1] == {"role": "assistant", "content": text.strip()}


async def test_a_session_that_ends_with_an_open_stream(stage: Stage) -> None:
    access, llm = await opened(stage)
    ids, text = spoken(stage)
    made = await llm.chat.completions.create(model="m", messages=[USER], stream=True)
    async with made as stream:
        assert await read_until((chunk.choices[0].delta.content async for chunk in stream), text) == text
        trajectory = await finished(stage, access)
    assert [turn.output_ids.tolist() for turn in trajectory.turns] == [ids]


async def test_a_retry_of_a_closed_stream_counts_instead_of_it(stage: Stage) -> None:
    access, _ = await opened(stage, sampling=LISTED)
    _, text = spoken(stage)
    stage.say("another one")
    async with client_of(stage, access) as client:
        await by_chat(client, text)
        await by_chat(client, "one", extra_headers={"x-stainless-retry-count": "1"})
        trajectory = await finished(stage, access)
    assert [turn.delivered for turn in trajectory.turns] == [False, True]


async def test_a_part_of_a_character_and_of_a_marker_is_not_delivered(stage: Stage) -> None:
    """What the gateway still held back when the client left is no part of the turn."""
    access, _ = await opened(stage, sampling=LISTED)
    ids = stage.say("So be it <tool_call>\n{}")
    end = len(stage.gateway.renderer.encode("So be it"))
    stage.engine.faults.append(Fault("pause", len(ids) - 2))
    async with client_of(stage, access) as client:
        await by_chat(client, "So be it", tools=TOOLS)
        trajectory = await finished(stage, access)
    assert trajectory.turns[0].output_ids.tolist() == ids[:end]


async def test_every_choice_of_a_closed_stream_keeps_its_own_part(stage: Stage) -> None:
    access, _ = await opened(stage, sampling=LISTED)
    parts = [spoken(stage, text, read)[1] for text, read in (("short", 3), ("a longer one", 6))]
    async with client_of(stage, access) as client:
        made = await client.openai.chat.completions.create(model="m", messages=[USER], stream=True, n=2)
        read = ["", ""]
        async with made as stream:
            async for chunk in stream:
                read[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                if sum(map(len, read)) == sum(map(len, parts)):
                    break
        trajectory = await finished(stage, access)
    decode = stage.gateway.renderer.decode
    assert (
        sorted(decode(turn.output_ids.tolist()) for turn in trajectory.turns) == sorted(parts) == sorted(read)
    )


# -- a gateway that is killed ------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "tiny")


@pytest.mark.parametrize("shorter", [0, 5])
@DIALECTS
async def test_a_closed_stream_outlives_the_gateway(
    model: Path, tmp_path: Path, ask: Ask, again: Ask, shorter: int
) -> None:
    async with staged(model, journal=tmp_path / "journal") as first:
        access = await first.client.open_session(task=TASK, sampling=LISTED)
        ids, text = spoken(first)
        async with client_of(first, access) as client:
            await ask(client, text)
        session = first.gateway.session(access.session_id)
        await eventually(
            lambda: bool(session.tree.nodes) and not session.pending_writes and not session.unpersisted
        )
        journal = killed(tmp_path)
    async with staged(model, journal=journal) as later:
        (node,) = later.gateway.session(access.session_id).tree.nodes
        assert (node.turn.delivered, node.delivery_unknown, node.turn.finish_reason) == (
            True,
            False,
            CLIENT_CLOSED,
        )
        async with client_of(later, access) as client:
            await again(client, text[: len(text) - shorter])
        again_killed = Path(tmp_path / "again")
        await eventually(lambda: not later.gateway.session(access.session_id).unpersisted)
        copy_journal(journal, again_killed)
        trajectory = await finished(later, access)
    assert np.concatenate([turn.output_ids for turn in trajectory.turns[:-1]]).tolist() == ids
    assert trajectory.turns[-1].parent == 0
    assert_trained_once(trajectory)
    async with staged(model, journal=again_killed) as last:
        turns = last.gateway.session(access.session_id).tree.turns()
        assert [turn.output_ids.tolist() for turn in turns] == [
            turn.output_ids.tolist() for turn in trajectory.turns
        ]
        assert all(turn.delivered for turn in turns[:-1])


async def test_a_closed_stream_that_was_retried_is_not_counted_after_a_kill(
    model: Path, tmp_path: Path
) -> None:
    async with staged(model, journal=tmp_path / "journal") as first:
        access = await first.client.open_session(task=TASK, sampling=LISTED)
        _, text = spoken(first)
        first.say("another one")
        async with client_of(first, access) as client:
            await by_chat(client, text)
            await by_chat(client, "one", extra_headers={"x-stainless-retry-count": "1"})
        session = first.gateway.session(access.session_id)
        await eventually(lambda: len(session.tree.nodes) == 2 and not session.pending_writes)
        journal = killed(tmp_path)
    async with staged(model, journal=journal) as later:
        trajectory = await finished(later, access)
    assert [turn.delivered for turn in trajectory.turns] == [False, True]
