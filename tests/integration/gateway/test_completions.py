"""The real `openai` SDK's Completions against a gateway: prompts as text and as ids."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.fakes import Stage, logprob_of
from tests.integration.gateway.sdk_stage import finished, opened, stage

__all__ = ["stage"]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_completion_and_the_turn_it_makes(stage: Stage, as_ids: bool) -> None:
    access, llm = await opened(stage)
    text = "<|im_start|>user\nTwo and\n"
    ids = stage.gateway.renderer.encode(text)
    said = stage.say(" <think> two is four.")
    reply = await llm.completions.create(model="m", prompt=ids if as_ids else text, max_tokens=30, logprobs=0)
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason) == (" <think> two is four.", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [
        pytest.approx(logprob_of(one, index)) for index, one in enumerate(said)
    ]
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:2] == [0, len((choice.logprobs.tokens or [""])[0])]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), len(said))
    [request] = stage.engine.requests
    assert request["input_ids"] == ids
    assert request["sampling_params"]["max_new_tokens"] == 30
    [turn] = (await finished(stage, access)).turns
    assert (turn.delta_ids.tolist(), turn.output_ids.tolist()) == (ids, said)


async def test_a_completion_comes_as_it_is_sampled(stage: Stage) -> None:
    _, llm = await opened(stage)
    said = stage.say("One, two, three.")
    stage.engine.stream_delay = asyncio.Event()
    stream = await llm.completions.create(
        model="m", prompt="Count", stream=True, stream_options={"include_usage": True}
    )
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        stage.engine.stream_delay.set()  # the first text is here while the rest is not sampled yet
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "One, two, three."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(said)


async def test_several_prompts_and_several_choices_of_each(stage: Stage) -> None:
    access, llm = await opened(stage)
    reply = await llm.completions.create(model="m", prompt=["a", "bc"], n=2, best_of=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    prompts = sorted(one["input_ids"] for one in stage.engine.requests)
    encode = stage.gateway.renderer.encode
    assert prompts == sorted([encode("a"), encode("a"), encode("bc"), encode("bc")])
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(encode("a")) + len(encode("bc"))
    assert len((await finished(stage, access)).turns) == 4


async def test_ids_that_start_with_a_recorded_sequence_extend_it(stage: Stage) -> None:
    access, llm = await opened(stage)
    prompt: list[int] = [65, 66, 67]
    for number in range(3):
        said = stage.say(f"Turn {number}")
        await llm.completions.create(model="m", prompt=prompt)
        assert stage.engine.requests[-1]["input_ids"] == prompt
        prompt = [*prompt, *said, 68, 69]
    trajectory = await finished(stage, access)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [turn.branch for turn in trajectory.turns] == [None] * 3
    assert [len(turn.delta_ids) for turn in trajectory.turns] == [3, 2, 2]
    assert len(trajectory.messages) == 6


async def test_other_prompts_are_branches_that_say_why(stage: Stage) -> None:
    access, llm = await opened(stage)
    said = [stage.say("One"), stage.say("Two"), stage.say("Three")]
    await llm.completions.create(model="m", prompt=[65, 66])
    await llm.completions.create(model="m", prompt=[70])
    await llm.completions.create(model="m", prompt=[65, 66, *said[0], 70])
    branches = [str(turn.branch) for turn in (await finished(stage, access)).turns]
    assert branches[1] == "prompt: it does not start with a recorded sequence"
    assert branches[2] == "older: turn 0 is continued, the newest is turn 1"


async def test_a_raw_prompt_is_no_chat_that_reads_alike(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say("Four")
    await llm.completions.create(model="m", prompt="Two?")
    messages: list[Any] = [
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": "More"},
    ]
    await llm.chat.completions.create(model="m", messages=messages)
    assert [turn.parent for turn in (await finished(stage, access)).turns] == [None, None]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 2}, "logprobs"),
    ({"n": 129}, "n must be"),
    ({"n": 100, "prompt": ["a", "b"]}, "prompt"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "no tokens"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "vocabulary"),
    ({"prompt": [2**40]}, "vocabulary"),
    ({"messages": []}, "messages"),
]


async def test_what_cannot_be_honoured_is_refused_by_name(stage: Stage) -> None:
    _, llm = await opened(stage)
    for body, name in REFUSED:
        with pytest.raises(openai.BadRequestError, match=name) as raised:
            await llm.completions.create(model="m", prompt="a", extra_body=body)
        assert raised.value.response.headers["x-should-retry"] == "false"
    assert stage.engine.requests == []
