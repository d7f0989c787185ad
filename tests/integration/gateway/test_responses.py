"""The real `openai` SDK's Responses against a gateway: items, streams, tools, continued responses."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from tests.fakes import Fault, Stage
from tests.integration.gateway.sdk_stage import CALL, finished, opened, stage
from tidegate.gateway.http import endpoints
from tidegate.types import Outcome, Sampling

__all__ = ["stage"]

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        "strict": True,
    }
]


async def whole(llm: AsyncOpenAI, **body: Any) -> Response:
    response: Response = await llm.responses.create(**{"model": "m", "input": "1+2?", **body})
    return response


async def streamed(llm: AsyncOpenAI, **body: Any) -> Response:
    """The response that the SDK puts together from the events, which count from 0."""
    async with llm.responses.stream(**{"model": "m", "input": "1+2?", **body}) as stream:
        numbers = [event.sequence_number async for event in stream]
        assert numbers == list(range(len(numbers)))
        response: Response = await stream.get_final_response()
        return response


BOTH = pytest.mark.parametrize("create", [whole, streamed])


@BOTH
async def test_a_response_and_the_turn_it_makes(stage: Stage, create: Any) -> None:
    access, llm = await opened(stage)
    ids = stage.say("It is 3.")
    response = await create(llm, instructions="Be brief.", max_output_tokens=40, metadata={"a": "b"})
    assert (response.output_text, response.status, response.object) == ("It is 3.", "completed", "response")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.id.startswith("resp_")
    [request] = stage.engine.requests
    assert request["sampling_params"]["max_new_tokens"] == 40
    assert response.usage is not None
    assert response.usage.input_tokens == len(request["input_ids"])
    assert response.usage.output_tokens == len(ids)
    trajectory = await finished(stage, access)
    assert trajectory.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "It is 3."},
    ]
    assert [turn.delivered for turn in trajectory.turns] == [True]


@BOTH
@pytest.mark.parametrize("kept", [True, False])
async def test_items_that_come_back_are_the_recorded_turn(stage: Stage, create: Any, kept: bool) -> None:
    """As they were given, or without their reasoning."""
    access, llm = await opened(stage)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
    sequences: list[list[int]] = []
    for number in range(3):
        said = stage.say(f"<think>\nHm {number}.\n</think>\n\nLet me see.\n{CALL}\n{CALL}")
        response = await create(llm, input=items, tools=TOOLS, include=["reasoning.encrypted_content"])
        prompt = stage.engine.requests[-1]["input_ids"]
        assert all(prompt[: len(one)] == one for one in sequences)
        sequences.append([*prompt, *said])
        reasoning, message, *calls = response.output
        assert reasoning.type == "reasoning"
        assert [part.text for part in reasoning.content or ()] == [f"Hm {number}."]
        assert (message.type, response.output_text) == ("message", "Let me see.")
        assert [(call.name, call.arguments) for call in calls] == [("calculator", '{"expression":"1+2"}')] * 2
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        items += [item.to_dict() for item in (response.output if kept else response.output[1:])]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    trajectory = await finished(stage, access)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [turn.branch for turn in trajectory.turns] == [None] * 3


@BOTH
@pytest.mark.parametrize("instructions", [None, "Be brief."])
async def test_a_response_is_continued_by_its_id(stage: Stage, create: Any, instructions: str | None) -> None:
    access, llm = await opened(stage)
    said = stage.say(f"<think>Hm.</think>{CALL}")
    first = await create(llm, tools=TOOLS, instructions=instructions)
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    second = await create(
        llm, tools=TOOLS, instructions=instructions, previous_response_id=first.id, input=[output]
    )
    assert second.previous_response_id == first.id
    prompt = stage.engine.requests[0]["input_ids"]
    assert stage.engine.requests[1]["input_ids"][: len(prompt) + len(said)] == [*prompt, *said]
    await create(
        llm, tools=TOOLS, instructions=instructions, previous_response_id=second.id, input="And then?"
    )
    trajectory = await finished(stage, access)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [turn.branch for turn in trajectory.turns] == [None] * 3
    assert trajectory.messages[-2] == {"role": "user", "content": "And then?"}


async def test_of_responses_that_read_alike_the_named_one_is_continued(stage: Stage) -> None:
    access, llm = await opened(stage)
    responses = []
    for _ in range(2):
        stage.say("Same.")
        responses.append(await whole(llm))
    for response in responses:
        await whole(llm, previous_response_id=response.id, input="More.")
    assert [turn.parent for turn in (await finished(stage, access)).turns] == [None, None, 0, 1]


async def test_instructions_are_not_carried_over(stage: Stage) -> None:
    access, llm = await opened(stage)
    first = await whole(llm, instructions="Be brief.")
    second = await whole(llm, previous_response_id=first.id, input="More.")
    await whole(llm, previous_response_id=second.id, input="More.", instructions="Be long.")
    texts = [stage.gateway.renderer.decode(one["input_ids"]) for one in stage.engine.requests]
    assert ["Be brief." in text for text in texts] == [True, False, False]
    assert ["Be long." in text for text in texts] == [False, False, True]
    assert all(turn.parent is None for turn in (await finished(stage, access)).turns)


async def test_items_may_be_referred_to(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say(f"Let me see. {CALL}")
    first = await whole(llm, tools=TOOLS)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "3"}
    await whole(llm, tools=TOOLS, input=[{"role": "user", "content": "1+2?"}, *references, output])
    trajectory = await finished(stage, access)
    assert [turn.branch for turn in trajectory.turns] == [None, None]
    assert trajectory.turns[1].parent == 0


async def test_an_item_reference_stands_for_that_item_alone(stage: Stage) -> None:
    """The AI SDK refers to texts and thoughts, and writes out calls and their results."""
    access, llm = await opened(stage)
    stage.say(f"<think>Hm.</think>So: {CALL} and {CALL}")
    first = await whole(llm, tools=TOOLS)
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call", "message", "function_call"]
    history: list[Any] = [{"role": "user", "content": "1+2?"}]
    for item in first.output:
        if item.type == "function_call":
            history.append(item.model_dump(include={"type", "call_id", "name", "arguments"}))
        else:
            history.append({"type": "item_reference", "id": item.id})
    for call in (first.output[2], first.output[4]):
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    await whole(llm, tools=TOOLS, input=history)
    trajectory = await finished(stage, access)
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    added = stage.gateway.renderer.decode(trajectory.turns[1].delta_ids.tolist())
    assert added.count("<tool_call>") == 0
    assert added.count("<tool_response>") == 2


async def test_items_that_are_left_out_are_not_in_the_prompt(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say(f"So: {CALL}{CALL}")
    first = await whole(llm, tools=TOOLS)
    kept = [{"type": "item_reference", "id": item.id} for item in (first.output[0], first.output[2])]
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "3"}
    await whole(llm, tools=TOOLS, input=[{"role": "user", "content": "1+2?"}, *kept, output])
    trajectory = await finished(stage, access)
    assert trajectory.turns[1].branch == "edited: message 1 (assistant) is not the recorded reply"
    prompt = stage.gateway.renderer.decode(trajectory.prompt_ids(trajectory.turns[1]).tolist())
    reply = prompt.partition("1+2?")[2]
    assert "So:" in reply
    assert reply.count("</tool_call>") == 1


EVENTS = [
    "created", "in_progress",
    "output_item.added", "content_part.added", "reasoning_text.delta",
    "reasoning_text.done", "content_part.done", "output_item.done",
    "output_item.added", "content_part.added", "output_text.delta",
    "output_text.done", "content_part.done", "output_item.done",
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    "completed",
]  # fmt: skip


async def test_the_events_of_a_stream(stage: Stage) -> None:
    _, llm = await opened(stage)
    stage.say(f"<think>Hm.</think>So: {CALL}")
    stream = await llm.responses.create(model="m", input="1+2?", tools=TOOLS, stream=True)
    events: list[Any] = [event async for event in stream]
    names = [event.type.removeprefix("response.") for event in events]
    assert [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]] == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    places = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert places == [0, 1, 2]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


@BOTH
async def test_a_reply_cut_by_length_is_incomplete(stage: Stage, create: Any) -> None:
    access, llm = await opened(stage, sampling=Sampling(max_tokens=3))
    stage.say("One, two, three, four")
    if create is whole:
        response = await create(llm)
    else:
        stream = await llm.responses.create(model="m", input="1+2?", stream=True)
        last: Any = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        response = last.response
    assert response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (await stage.client.finish(access.session_id, reward=0)).outcome is Outcome.TRUNCATED


class Answer(BaseModel):
    value: int


async def test_a_schema_goes_to_the_engine_in_evaluation_and_is_free_text_in_training(stage: Stage) -> None:
    _, llm = await opened(stage, split="eval")
    stage.say('{"value": 3}')
    response = await llm.responses.parse(model="m", input="1+2?", text_format=Answer)
    assert response.output_parsed == Answer(value=3)
    assert "json_schema" in stage.engine.requests[0]["sampling_params"]
    _, llm = await opened(stage)
    stage.say('{"value": 4}')
    response = await llm.responses.parse(model="m", input="1+2?", text_format=Answer)
    assert response.output_parsed == Answer(value=4)
    assert "json_schema" not in stage.engine.requests[1]["sampling_params"]


@BOTH
async def test_functions_of_a_namespace(stage: Stage, create: Any) -> None:
    """The model knows them under both names; the client sees and sends the two apart."""
    access, llm = await opened(stage)
    space: Any = {"type": "namespace", "name": "maths", "description": "Sums.", "tools": TOOLS}
    items: list[Any] = [{"role": "user", "content": "1+2?"}]
    stage.say(CALL.replace("calculator", "maths.calculator"))
    extra = {"client_metadata": {"turn": "1"}}
    response = await create(llm, input=items, tools=[space, *TOOLS], extra_body=extra)
    [call] = response.output
    assert (call.namespace, call.name, call.arguments) == ("maths", "calculator", '{"expression":"1+2"}')
    items += [call.model_dump(exclude_none=True, exclude={"parsed_arguments"})]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    stage.say(CALL)
    response = await create(llm, input=items, tools=[space, *TOOLS])
    assert (response.output[0].namespace, response.output[0].name) == (None, "calculator")
    prompt = stage.gateway.renderer.decode(stage.engine.requests[-1]["input_ids"])
    assert '"name": "maths.calculator"' in prompt
    await stage.client.finish(access.session_id, reward=1)
    trajectory = await stage.client.trajectory(access.session_id)
    assert [(turn.parent, turn.branch) for turn in trajectory.turns] == [(None, None), (0, None)]


async def test_tool_choices(stage: Stage) -> None:
    _, llm = await opened(stage)
    start = '<tool_call>\n{"name":'
    stage.say(CALL.removeprefix(start), ended=False)
    response = await whole(llm, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["function_call"]
    assert stage.engine.requests[0]["sampling_params"]["stop"] == ["</tool_call>"]
    stage.say(CALL.removeprefix(start + ' "calculator", "arguments":'))
    choice = {"type": "function", "name": "calculator"}
    response = await whole(llm, tools=TOOLS, tool_choice=choice)
    assert [item.type for item in response.output] == ["function_call"]
    stage.say(CALL)
    response = await whole(llm, tools=TOOLS, tool_choice="none")
    assert response.output_text == CALL


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [1]}, r"input\[0\]"),
    ({"previous_response_id": "resp_x"}, "resp_x"),
    ({"previous_response_id": "resp_" + "0" * 32}, "no response"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"reasoning": {"effort": "extreme"}}, r"reasoning\.effort"),
    ({"reasoning": {"summary": "long"}}, r"reasoning\.summary"),
    ({"text": {"verbosity": "loud"}}, r"text\.verbosity"),
    ({"text": {"format": {"type": "json_schema"}}}, r"text\.format"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\].*web_search"),
    ({"tools": [{"type": "custom", "name": "x"}]}, r"tools\[0\].*custom"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
        r"tools\[0\]\.tools\[0\]",
    ),
    ({"tools": [{"type": "namespace", "tools": []}]}, r"tools\[0\].*namespace"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    ({"input": [{"type": "computer_call"}]}, r"input\[0\].*computer_call"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "no item"),
    ({"input": [{"type": "item_reference", "id": "fc_"}]}, "no item"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input_image",
    ),
]


async def test_what_cannot_be_honoured_is_refused_by_name(stage: Stage) -> None:
    _, llm = await opened(stage)
    retrying = llm.with_options(max_retries=3)
    for body, name in REFUSED:
        with pytest.raises(openai.BadRequestError, match=name) as raised:
            await whole(retrying, extra_body=body)
        assert raised.value.response.headers["x-should-retry"] == "false"
    assert stage.engine.requests == []


async def test_an_effort_a_summary_and_a_verbosity_are_accepted(stage: Stage) -> None:
    _, llm = await opened(stage)
    response = await whole(llm, reasoning={"effort": "low", "summary": "detailed"}, text={"verbosity": "low"})
    assert (response.status, response.model) == ("completed", "policy")


async def test_another_session_s_response_is_not_found(stage: Stage) -> None:
    _, llm = await opened(stage)
    first = await whole(llm)
    _, other = await opened(stage)
    with pytest.raises(openai.BadRequestError) as raised:
        await whole(other, previous_response_id=first.id)
    assert raised.value.code == "previous_response_not_found"


async def test_a_silent_stream_is_kept_alive_and_its_failure_is_reported(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "KEEP_ALIVE_S", 0.02)
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("hang"))
    stream = await llm.responses.create(model="m", input="1+2?", stream=True)
    assert (await anext(stream)).type == "response.created"
    assert (await anext(stream)).type == "response.in_progress"
    await stage.client.finish(access.session_id, outcome=Outcome.CANCELLED)
    with pytest.raises(openai.APIError, match="session is over"):
        await anext(stream)


async def test_a_retry_gets_the_response_of_its_idempotency_key(stage: Stage) -> None:
    _, llm = await opened(stage)
    first, again = [await whole(llm, extra_headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert first == again
    assert len(stage.engine.requests) == 1
