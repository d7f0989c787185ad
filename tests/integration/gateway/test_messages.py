"""The real `anthropic` SDK against a gateway: replies, streams, tools, histories, refusals."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest
from anthropic import AsyncAnthropic

from tests.fakes import Fault, Stage
from tests.integration.gateway.sdk_stage import CALL, TASK, stage
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.http import endpoints
from tidegate.types import Outcome, Sampling

__all__ = ["stage"]
TOOLS: list[Any] = [
    {
        "name": "calculator",
        "description": "Computes.",
        "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
]
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
BODY: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": ASK}


async def opened(stage: Stage, **options: Any) -> tuple[SessionAccess, AsyncAnthropic]:
    access = await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options})
    root = access.base_url.removesuffix("/v1")
    llm = AsyncAnthropic(base_url=root, api_key=access.api_key, max_retries=0)
    return access, await stage.stack.enter_async_context(llm)


async def whole(llm: AsyncAnthropic, **body: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = await llm.messages.create(**{**BODY, **body})
    return message


async def streamed(llm: AsyncAnthropic, **body: Any) -> anthropic.types.Message:
    async with llm.messages.stream(**{**BODY, **body}) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_message()


BOTH = pytest.mark.parametrize("create", [whole, streamed])


@BOTH
async def test_a_reply_and_the_turn_it_makes(stage: Stage, create: Any) -> None:
    access, llm = await opened(stage, split="eval")
    ids = stage.say("It is 3.")
    message = await create(llm, system="Be brief.", extra_body={"temperature": 0.25, "top_k": 7})
    assert [block.model_dump(include={"type", "text"}) for block in message.content] == [
        {"type": "text", "text": "It is 3."}
    ]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    [request] = stage.engine.requests
    sent = request["sampling_params"]
    assert (sent["temperature"], sent["top_k"], sent["max_new_tokens"]) == (0.25, 7, 200)
    assert message.usage.input_tokens == len(request["input_ids"])
    assert message.usage.output_tokens == len(ids)
    assert (await stage.client.finish(access.session_id, reward=0.5)).outcome is Outcome.COMPLETED
    trajectory = await stage.client.trajectory(access.session_id)
    assert trajectory.messages == [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "It is 3."},
    ]
    assert [turn.delivered for turn in trajectory.turns] == [True]


@BOTH
@pytest.mark.parametrize("kept", [True, False])
async def test_a_tool_loop_extends_the_recorded_ids(stage: Stage, create: Any, kept: bool) -> None:
    """Blocks come back as they were given, or without their thinking: the same history."""
    access, llm = await opened(stage)
    messages = list(ASK)
    sequences: list[list[int]] = []
    for number in range(3):
        said = stage.say(f"<think>\nHm {number}.\n</think>\n\nLet me see.\n{CALL}\n{CALL}")
        message = await create(llm, messages=messages, tools=TOOLS)
        prompt = stage.engine.requests[-1]["input_ids"]
        assert all(prompt[: len(one)] == one for one in sequences)
        sequences.append([*prompt, *said])
        assert message.stop_reason == "tool_use"
        thinking, text, *uses = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", f"Hm {number}.")
        assert (text.type, text.text) == ("text", "Let me see.")
        assert [(use.name, use.input) for use in uses] == [("calculator", {"expression": "1+2"})] * 2
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "3"}]}
            for use in uses
        ]
        content = message.content if kept else message.content[1:]
        blocks = [block.model_dump(exclude_none=True) for block in content]
        messages += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
        ]
    await stage.client.finish(access.session_id, reward=1)
    trajectory = await stage.client.trajectory(access.session_id)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [turn.branch for turn in trajectory.turns] == [None] * 3
    assert [message["role"] for message in trajectory.messages[:5]] == [
        "user", "assistant", "tool", "tool", "user",
    ]  # fmt: skip


async def test_the_events_of_a_stream(stage: Stage) -> None:
    _, llm = await opened(stage)
    stage.say(f"<think>Hm.</think>So: {CALL}")
    stream = await llm.messages.create(**BODY, tools=TOOLS, stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert sorted(set(deltas), key=deltas.index) == [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta",
    ]  # fmt: skip
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2]


@BOTH
async def test_thinking_is_signed(stage: Stage, create: Any) -> None:
    """Clients rewrite thinking whose signature is empty as text of their own."""
    _, llm = await opened(stage)
    stage.say("<think>Hm.</think>It is 3.")
    thinking, text = (await create(llm)).content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "It is 3.")
    assert thinking.signature


async def test_a_stream_gives_the_signature_before_its_block_ends(stage: Stage) -> None:
    _, llm = await opened(stage)
    stage.say("<think>Hm.</think>It is 3.")
    events = [event async for event in await llm.messages.create(**BODY, stream=True)]
    first = [getattr(event, "delta", event).type for event in events if getattr(event, "index", None) == 0]
    assert first[0] == "content_block_start"
    assert first[-2:] == ["signature_delta", "content_block_stop"]
    assert first.count("signature_delta") == 1


@BOTH
async def test_why_a_reply_ended(stage: Stage, create: Any) -> None:
    _, llm = await opened(stage, sampling=Sampling(max_tokens=20))
    stage.say("One STOP two", ended=False)
    message = await create(llm, stop_sequences=["never", "STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "One "
    stage.say("One, two, three, four")
    assert (await create(llm, max_tokens=3)).stop_reason == "max_tokens"
    stage.say("")
    message = await create(llm)
    assert (message.stop_reason, message.content) == ("end_turn", [])


async def test_tokens_are_counted_as_they_will_be_sent(stage: Stage) -> None:
    _, llm = await opened(stage)
    counted = await llm.messages.count_tokens(model="m", messages=ASK, system="Be brief.", tools=TOOLS)
    assert stage.engine.requests == []
    message = await whole(llm, system="Be brief.", tools=TOOLS)
    assert counted.input_tokens == len(stage.engine.requests[0]["input_ids"]) == message.usage.input_tokens
    history = [*ASK, {"role": "assistant", "content": message.content}, *ASK]
    counted = await llm.messages.count_tokens(model="m", messages=history, system="Be brief.", tools=TOOLS)
    await whole(llm, messages=history, system="Be brief.", tools=TOOLS)
    assert counted.input_tokens == len(stage.engine.requests[1]["input_ids"])


async def test_a_count_does_not_touch_the_record(stage: Stage) -> None:
    """It is no request of the conversation: the next turn is compared with the last one that was sampled."""
    access, llm = await opened(stage)
    first = await whole(llm)
    history = [*ASK, {"role": "assistant", "content": first.content}, *ASK]
    other: Any = [{"role": "user", "content": "A title, please."}]
    before = await stage.client.metrics()
    for counted in (history, other, [*history, {"role": "assistant", "content": "Hm."}, *other]):
        await llm.messages.count_tokens(model="m", messages=counted)
    node = stage.gateway.session(access.session_id).tree.nodes[0]
    assert not node.quoted
    after = await stage.client.metrics()
    names = ("rerendered", "undelivered", "branches")
    for name in names:
        assert [row for row in after.split("\n") if name in row] == [
            row for row in before.split("\n") if name in row
        ]
    await whole(llm, messages=other)
    await stage.client.finish(access.session_id, reward=0)
    second = (await stage.client.trajectory(access.session_id)).turns[1]
    assert second.branch == "edited: message 0 (user) differs from the last request's"


async def test_tool_choices(stage: Stage) -> None:
    _, llm = await opened(stage)
    start = '<tool_call>\n{"name":'
    stage.say(CALL.removeprefix(start), ended=False)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = await whole(llm, tools=TOOLS, tool_choice=choice)
    assert message.content[0].type == "tool_use"
    assert stage.engine.requests[0]["sampling_params"]["stop"] == ["</tool_call>"]
    start += ' "calculator", "arguments":'
    stage.say(CALL.removeprefix(start))
    message = await whole(llm, tools=TOOLS, tool_choice={"type": "tool", "name": "calculator"})
    assert message.content[0].type == "tool_use"
    stage.say(CALL)
    message = await whole(llm, tools=TOOLS, tool_choice={"type": "none"})
    assert message.content[0].text == CALL


async def test_a_schema_goes_to_the_engine_in_evaluation(stage: Stage) -> None:
    _, llm = await opened(stage, split="eval")
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    await whole(llm, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert orjson.loads(stage.engine.requests[0]["sampling_params"]["json_schema"]) == schema


async def test_thinking_may_be_switched_off(stage: Stage) -> None:
    _, llm = await opened(stage)
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}):
        await whole(llm, thinking=thinking)
    off, on = (stage.gateway.renderer.decode(one["input_ids"]) for one in stage.engine.requests)
    assert off == on + "<think>\n\n</think>\n\n"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 2}, "temperature"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"output_config": {"effort": "extreme"}}, r"output_config\.effort"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, r"management\.edits\[0\]"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, r"management\.edits\[0\]"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].*web_search"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": [*ASK, {"role": "assistant", "content": "It is"}]}, "assistant's"),
    ({"messages": [{"role": "critic", "content": "x"}]}, r"messages\[0\]\.role"),
    ({"system": [{"type": "image"}]}, r"system\[0\].*image"),
    *(
        ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, rf"\.content\[0\].*{kind}'")
        for kind in ("image", "document", "search_result", "tool_use", "container_upload")
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, *ASK]},
        "server_tool_use",
    ),
]  # fmt: skip


async def test_what_cannot_be_honoured_is_refused_by_name(stage: Stage) -> None:
    _, llm = await opened(stage)
    retrying = llm.with_options(max_retries=3)
    for body, name in REFUSED:
        with pytest.raises(anthropic.BadRequestError, match=name) as raised:
            await retrying.messages.create(**BODY, extra_body=body)
        assert raised.value.response.headers["x-should-retry"] == "false"
        told: Any = raised.value.body
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert stage.engine.requests == []


async def test_settings_that_change_nothing_are_accepted(stage: Stage) -> None:
    """As Claude Code sends them with every request."""
    _, llm = await opened(stage)
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    stage.say("Well.")
    await whole(llm, extra_body={"context_management": keep, "output_config": {"effort": "high"}})
    stage.say("Again.")
    await whole(llm)
    stage.say("Once more.")
    await whole(llm, output_config={"effort": "low"})
    asked, plainly, less = (request["input_ids"] for request in stage.engine.requests)
    assert asked == plainly == less


async def test_the_sdks_tool_loop_gets_an_error_that_asks_for_whole_histories(stage: Stage) -> None:
    """Its runner asks for a history that is kept by the server first, and goes on without."""
    access, llm = await opened(stage)

    @anthropic.beta_async_tool
    async def calculator(expression: str) -> str:
        """Computes."""
        return "3"

    stage.say(CALL)
    stage.say("It is 3.")
    runner = llm.beta.messages.tool_runner(model="m", max_tokens=99, messages=ASK, tools=[calculator])
    message = await runner.until_done()
    assert [block.text for block in message.content if block.type == "text"] == ["It is 3."]
    await stage.client.finish(access.session_id, reward=1)
    trajectory = await stage.client.trajectory(access.session_id)
    assert [(turn.parent, turn.branch) for turn in trajectory.turns] == [(None, None), (0, None)]


async def test_keys_in_either_header_open_the_session_and_no_other(stage: Stage) -> None:
    access, llm = await opened(stage)
    await whole(llm)
    await whole(llm.with_options(api_key=None, auth_token=access.api_key))
    other, _ = await opened(stage)
    for key in ("wrong", other.api_key, access.api_key + "x"):
        with pytest.raises(anthropic.AuthenticationError) as raised:
            await whole(llm.with_options(api_key=key))
        assert key not in str(raised.value)
        assert "4711" not in str(raised.value)


async def test_models_in_anthropic_s_shape(stage: Stage) -> None:
    _, llm = await opened(stage)
    assert [model.id async for model in llm.models.list()] == ["policy"]
    assert (await llm.models.retrieve("policy")).id == "policy"
    assert (await whole(llm)).model == "policy"
    with pytest.raises(anthropic.NotFoundError, match=r"claude.*'policy'"):
        await llm.models.retrieve("claude")
    with pytest.raises(anthropic.AuthenticationError):
        await llm.with_options(api_key="wrong").models.list()


async def test_errors_have_anthropic_s_types(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("garbage"))
    with pytest.raises(anthropic.APIStatusError, match="api_error") as raised:
        await whole(llm.with_options(max_retries=3))
    assert raised.value.status_code == 424
    await stage.client.finish(access.session_id)
    with pytest.raises(anthropic.PermissionDeniedError, match="permission_error"):
        await whole(llm)
    with pytest.raises(anthropic.PermissionDeniedError):
        await llm.messages.count_tokens(model="m", messages=ASK)


async def test_a_prompt_too_long_is_said_in_the_words_clients_know(stage: Stage) -> None:
    _, llm = await opened(stage)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens"):
        await whole(llm, messages=[{"role": "user", "content": "many words " * 4000}])


async def test_a_silent_stream_is_pinged(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "KEEP_ALIVE_S", 0.02)
    _, llm = await opened(stage)
    stage.say("Four")
    stage.engine.faults.append(Fault("hold"))
    async with llm.messages.with_streaming_response.create(**BODY, stream=True) as response:
        lines = response.iter_lines()
        async for line in lines:
            if line == "event: ping":
                break
        stage.engine.release()
        rest = [line async for line in lines]
    assert "event: message_stop" in rest


async def test_a_stream_that_fails_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "KEEP_ALIVE_S", 0.02)
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("hang"))
    stream = await llm.messages.create(**BODY, stream=True)
    assert (await anext(stream)).type == "message_start"
    await stage.client.finish(access.session_id, outcome=Outcome.CANCELLED)
    with pytest.raises(anthropic.APIStatusError, match="permission_error"):
        await anext(stream)


async def test_a_retry_gets_the_turn_of_its_idempotency_key(stage: Stage) -> None:
    _, llm = await opened(stage)
    first, again = [await whole(llm, extra_headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert first == again
    assert len(stage.engine.requests) == 1
