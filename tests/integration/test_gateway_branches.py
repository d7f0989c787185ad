"""Chat histories that are no continuation of what was recorded: branches, with their reason."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import Stage
from tests.integration.chat_calls import ASK, TOOLS
from tests.integration.sdk_stage import opened, stage

__all__ = ["stage"]


async def test_parallel_calls_and_sub_agents_are_branches(stage: Stage) -> None:
    access, llm = await opened(stage)
    first = await llm.chat.completions.create(model="m", messages=ASK)
    history = [*ASK, first.choices[0].message.model_dump(exclude_none=True)]
    await asyncio.gather(
        *(
            llm.chat.completions.create(model="m", messages=[*history, {"role": "user", "content": text}])
            for text in ("left", "right")
        ),
        llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "a sub-agent"}]),
    )
    await stage.client.finish(access.session_id, reward=0)
    turns = (await stage.client.trajectory(access.session_id)).turns
    assert sorted(str(turn.parent) for turn in turns) == ["0", "0", "None", "None"]
    assert sum(turn.branch is not None for turn in turns) == 2
    sampled = sum(len(stage.engine.output_for(one["input_ids"], 99)) for one in stage.engine.requests)
    assert sum(len(turn.output_ids) for turn in turns) == sampled


async def test_changed_tools_are_an_explicit_branch(stage: Stage) -> None:
    access, llm = await opened(stage)
    first = await llm.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    history = [*ASK, first.choices[0].message.model_dump(exclude_none=True), ASK[1]]
    await llm.chat.completions.create(model="m", messages=history)
    await stage.client.finish(access.session_id, reward=0)
    second = (await stage.client.trajectory(access.session_id)).turns[1]
    assert second.parent is None
    assert second.branch == "tools: they or the template's options differ from those of turn 0"
    assert 'branches_total{reason="tools"} 1' in await stage.client.metrics()


@pytest.mark.parametrize("stage", ["shouting"], indirect=True)
async def test_a_template_that_permits_no_follow_up_renders_whole_and_says_so(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.stop_id = 2
    messages = list(ASK)
    for _ in range(2):
        reply = await llm.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), ASK[1]]
    await stage.client.finish(access.session_id, reward=0)
    second = (await stage.client.trajectory(access.session_id)).turns[1]
    assert second.parent is None
    assert str(second.branch).startswith("template: ")
