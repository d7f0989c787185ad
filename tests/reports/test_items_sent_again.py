"""Items that a client sends again beside `previous_response_id` are not counted twice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import Stage
from tests.integration.gateway.sdk_stage import CALL, finished, opened, stage

__all__ = ["stage"]

TOOL: Any = {
    "type": "function",
    "name": "calculator",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
Q1: Any = {"role": "user", "content": "1+2?"}
Q2: Any = {"role": "user", "content": "And 4?"}
SAID = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


def without_ids(items: list[Any]) -> list[Any]:
    return [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]


def references(items: list[Any]) -> list[Any]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def calls_of(items: list[Any]) -> list[Any]:
    return [item for item in items if item["type"] == "function_call"]


def outputs_of(items: list[Any]) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"3 {number}"}
        for number, item in enumerate(calls_of(items))
    ]


@pytest.mark.parametrize(
    "again",
    [
        lambda items: [Q1, *items],  # the whole history
        lambda items: [Q1, *without_ids(items)],
        lambda items: items,  # the last reply
        lambda items: without_ids(items),
        lambda items: [{"role": "developer", "content": "Be brief."}, Q1, *items],
        lambda items: calls_of(items),  # its calls
        lambda items: without_ids(calls_of(items)),
        lambda items: [item for item in items if item["type"] != "reasoning"],
        lambda items: references(items),
    ],
)
async def test_the_history_of_a_previous_response(stage: Stage, again: Any) -> None:
    """NousResearch/hermes-agent#95137 and #101644, VoltAgent/voltagent#1121, earendil-works/pi#5151"""
    access, llm = await opened(stage)
    stage.say(SAID)
    developer = {"role": "developer", "content": "Be brief."}
    first = await llm.responses.create(model="m", input=[developer, Q1], tools=[TOOL])
    items = [item.model_dump(exclude_none=True) for item in first.output]
    stage.say("It is 3.")
    more: Any = [*again(items), *outputs_of(items), Q2]
    await llm.responses.create(model="m", input=more, previous_response_id=first.id, tools=[TOOL])
    trajectory = await finished(stage, access)
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["developer", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert [(turn.parent, turn.branch) for turn in trajectory.turns] == [(None, None), (0, None)]


async def test_outputs_that_are_answered_and_replies_before_the_last(stage: Stage) -> None:
    """NousResearch/hermes-agent#95137: over several turns"""
    access, llm = await opened(stage)
    stage.say(SAID)
    response = await llm.responses.create(model="m", input=[Q1], tools=[TOOL])
    items = [item.model_dump(exclude_none=True) for item in response.output]
    stage.say("It is 3.")
    options: Any = {"model": "m", "tools": [TOOL]}
    response = await llm.responses.create(
        **options, input=outputs_of(items), previous_response_id=response.id
    )
    last: Any = [item.model_dump(exclude_none=True) for item in response.output]
    for again in (outputs_of(items), [*items, *outputs_of(items), *last]):
        stage.say("It is 4.")
        await llm.responses.create(**options, input=[*again, Q2], previous_response_id=response.id)
        prompt = stage.gateway.renderer.decode(stage.engine.requests[-1]["input_ids"])
        assert [prompt.count(text) for text in ("1+2?", "3 0", "3 1", "It is 3.", "And 4?")] == [1] * 5
    trajectory = await finished(stage, access)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 1]


async def test_what_only_resembles_the_history_is_new(stage: Stage) -> None:
    """NousResearch/hermes-agent#101644, the other way round: nothing is left out that a client means"""
    access, llm = await opened(stage)
    stage.say("Yes.")
    first = await llm.responses.create(model="m", input=[Q1])
    counts: list[list[str]] = []
    for more in (
        [Q1],  # the question again
        [Q1, Q2],
        [Q2, {"role": "assistant", "content": "Yes."}, Q1],  # an example
        [{"role": "assistant", "content": "No."}, Q2],
    ):
        stage.say("Yes.")
        await llm.responses.create(model="m", input=more, previous_response_id=first.id)
        prompt = stage.gateway.renderer.decode(stage.engine.requests[-1]["input_ids"])
        counts.append([text for text in ("1+2?", "And 4?", "Yes.", "No.") for _ in range(prompt.count(text))])
    await finished(stage, access)
    assert counts == [
        ["1+2?", "1+2?", "Yes."],
        ["1+2?", "1+2?", "And 4?", "Yes."],
        ["1+2?", "1+2?", "And 4?", "Yes.", "Yes."],
        ["1+2?", "And 4?", "Yes.", "No."],
    ]
