"""Chat histories that do not continue the recorded turns become branches, with their reason."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import Stage
from tests.integration.gateway.chat_calls import ASK, TOOLS
from tests.integration.gateway.sdk_stage import CALL, finished, opened, stage

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


async def test_the_reason_of_a_branch_with_a_long_text_names_the_edited_message(stage: Stage) -> None:
    access, llm = await opened(stage)
    await llm.chat.completions.create(model="m", messages=ASK)
    edited = [*ASK, {"role": "assistant", "content": "word " * 850}, {"role": "user", "content": "Go on."}]
    await llm.chat.completions.create(model="m", messages=edited)
    second = (await finished(stage, access)).turns[1]
    assert second.branch == "edited: message 2 (assistant) is not the recorded reply"


async def _named_twice(stage: Stage, said: str, **changed: object) -> list[tuple[int | None, str | None]]:
    """Three turns of a client that changes every past reply; where each turn belongs, and why."""
    access, llm = await opened(stage)
    messages = list(ASK)
    for _ in range(3):
        stage.say(said)
        reply = await llm.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        message = {**reply.choices[0].message.model_dump(exclude_none=True), **changed}
        calls = message.get("tool_calls", [])
        messages += [message, *({"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in calls)]
        messages.append({"role": "user", "content": "Go on."})
    return [(turn.parent, turn.branch) for turn in (await finished(stage, access)).turns]


ONE_LINE = [(None, None), (0, None), (1, None)]


async def test_a_name_that_the_template_does_not_write_is_the_same_history(stage: Stage) -> None:
    assert await _named_twice(stage, "It is 3.", name="Solver") == ONE_LINE
    assert await _named_twice(stage, f"<think>Hm.</think>It is 3.\n{CALL}", name="Solver") == ONE_LINE


@pytest.mark.parametrize("stage", ["named"], indirect=True)
async def test_a_name_that_the_template_writes_is_another_history(stage: Stage) -> None:
    (_, _), (second, why), (third, _) = await _named_twice(stage, "It is 3.", name="Solver")
    assert (second, third) == (None, None)
    assert why == "edited: message 2 (assistant) is not the recorded reply"


@pytest.mark.parametrize(("stage", "same"), [("named", True), ("qwen3", False)], indirect=["stage"])
async def test_text_beside_calls_counts_where_the_template_writes_it(stage: Stage, same: bool) -> None:
    turns = await _named_twice(stage, f"It is 3.\n{CALL}", content=None)
    assert (turns == ONE_LINE) is same


async def test_of_several_choices_the_named_one_is_continued(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say("It is 3.")
    stage.say("It is 4.")
    reply = await llm.chat.completions.create(model="m", messages=ASK, n=2)
    for choice in reply.choices:
        message = {**choice.message.model_dump(exclude_none=True), "name": "Solver"}
        await llm.chat.completions.create(model="m", messages=[*ASK, message, ASK[1]])
    turns = (await finished(stage, access)).turns
    replies = [stage.gateway.renderer.decode(turn.output_ids.tolist()) for turn in turns]
    for turn, choice in zip(turns[2:], reply.choices, strict=True):
        assert turn.parent is not None
        assert str(choice.message.content) in replies[turn.parent]


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
