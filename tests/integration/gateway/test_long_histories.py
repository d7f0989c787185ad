"""Long conversations are recorded alike, whether their histories are parsed again or recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Stage, staged
from tests.integration.gateway.sdk_stage import TASK, finished, opened
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.sessions.body_prefixes import BodyPrefixes
from tidegate.gateway.turns import request_reader

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
]


async def conversation(stage: Stage) -> tuple[Any, list[Any]]:
    """A session with parallel conversations, an edit, a retry, other tools and long texts; its record."""
    access, llm = await opened(stage, task=TASK, deadline_s=60.0)
    stage.engine.max_context = stage.gateway.pool.engines()[0].max_context = 10**6

    async def turn(messages: list[Any], text: str, **options: Any) -> None:
        reply = await llm.chat.completions.create(model="m", messages=messages, max_tokens=8, **options)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        messages += [{"role": "user", "content": text}]

    main: list[Any] = [{"role": "system", "content": "Be brief. " * 100}, {"role": "user", "content": "1+2?"}]
    side: list[Any] = [{"role": "user", "content": "another conversation " * 50}]
    for number in range(4):
        await turn(main, f"and {number}?", tools=TOOLS)
        await turn(side, f"or {number}?")
    edited = [*main[:3], {"role": "user", "content": "no: 3+4?"}]
    await turn(edited, "again", tools=TOOLS)
    await turn(edited, "with a long text " * 600, tools=TOOLS)
    await turn(edited, "and another", tools=TOOLS)
    await turn(list(main), "", tools=TOOLS, extra_headers={"x-stainless-retry-count": "1"})
    await turn(main, "without tools", n=2)
    await turn(main, "last")
    session = stage.gateway.session(access.session_id)
    nodes = [
        (
            node.request.digest,
            node.history_hash,
            node.reply_hash,
            node.tools_hash,
            node.new_messages,
            node.reply,
        )
        for node in session.tree.nodes
    ]
    trajectory = await finished(stage, access)
    turns = [
        (
            one.parent, one.branch, one.delta_ids.tolist(), one.output_ids.tolist(), one.logprobs.tolist(),
            one.finish_reason, one.delivered,
        )
        for one in trajectory.turns
    ]  # fmt: skip
    return nodes, [turns, trajectory.messages]


@pytest.mark.parametrize("large", [2**18, 3000])
async def test_a_session_is_recorded_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    """With `large` 3000, most bodies are parsed in threads."""
    monkeypatch.setattr(request_reader, "LARGE", large)
    repeated = 0
    read = BodyPrefixes.read

    def counted(self: BodyPrefixes, *arguments: Any) -> Any:
        nonlocal repeated
        found = read(self, *arguments)
        repeated += found is not None
        return found

    monkeypatch.setattr(BodyPrefixes, "read", counted)
    model = make_model_dir(tmp_path / "tiny")
    records = []
    for least in (10**9, 0):
        monkeypatch.setattr(request_reader, "MIN_BODY", least)
        async with staged(model) as stage:
            records.append(await conversation(stage))
        assert (repeated > 8) == (least == 0)
    assert records[0] == records[1]


async def test_the_prefixes_of_a_finished_session_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "MIN_BODY", 0)
    async with staged(make_model_dir(tmp_path / "tiny")) as stage:
        access, llm = await opened(stage)
        session = stage.gateway.session(access.session_id)
        await llm.chat.completions.create(model="m", messages=TASK.messages)
        assert session.body_prefixes._newest
        await finished(stage, access)
        assert not session.body_prefixes._newest
