"""The real SDKs, the gateway and the embedded engine with a model that calls its tool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import pytest
from openai import AsyncOpenAI, AuthenticationError, NotFoundError

from tests.clients.support import BASE_MODEL, NEARLY_GREEDY, TASK, Episode
from tests.fakes import served
from tests.integration.engine.engine_http import serving
from tidegate.agents.calculator import calculate
from tidegate.agents.solver import TOOLS
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.gateway.client import GatewayClient, SessionAccess
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.trainer.batch.rows import rows_of

FUNCTION = TOOLS[0]["function"]
ANSWER = "#### 140"
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def parts() -> tuple[EngineOptions, Model, TokenDecoder]:
    options = EngineOptions(BASE_MODEL)
    return options, load_model(options), TokenDecoder.load(BASE_MODEL)


@dataclass(slots=True)
class Room:
    """One session before the engine, and its clients."""

    gateway: Gateway
    client: GatewayClient
    access: SessionAccess
    openai: AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    results: list[str] = field(default_factory=list)
    """What the tool answered."""

    def use(self, name: str, arguments: dict[str, Any]) -> str:
        assert name == "calculator"
        self.results.append(calculate(arguments["expression"]))
        return self.results[-1]

    async def episode(self, output: str) -> Episode:
        await self.client.finish(self.access.session_id, output=output, reward=1.0)
        return Episode(output, await self.client.trajectory(self.access.session_id))


@pytest.fixture
async def room(parts: tuple[EngineOptions, Model, TokenDecoder]) -> AsyncIterator[Room]:
    parts[1].cache.drop()
    async with (
        serving(Engine(*parts)) as engine,
        served(create_app(gateway := Gateway(GatewayOptions(BASE_MODEL, engine_urls=[engine.url])))) as url,
        GatewayClient(url) as client,
    ):
        access = await client.open_session(task=TASK, seed=3, deadline_s=60, sampling=NEARLY_GREEDY)
        key, root = access.api_key, access.base_url.removesuffix("/v1")
        async with (
            AsyncOpenAI(base_url=access.base_url, api_key=key, max_retries=0) as openai,
            anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as claude,
        ):
            yield Room(gateway, client, access, openai, claude)


def check(episode: Episode, room: Room) -> None:
    """One call of the tool, then the answer; all of it recorded as one line."""
    assert room.results == ["140"]
    assert episode.output == ANSWER
    episode.assert_one_line(2)
    first, second = episode.trajectory.turns
    assert (first.parse, second.parse) == ("ok", None)
    assert room.gateway.renderer.decode(second.output_ids.tolist()) == ANSWER
    assert room.gateway.metrics.drifted_turns == 0


@STREAMED
async def test_chat(room: Room, streamed: bool) -> None:
    messages: list[Any] = list(TASK.messages)
    while True:
        body: Any = {"model": "m", "messages": messages, "tools": TOOLS}
        if streamed:
            async with room.openai.chat.completions.stream(**body) as stream:
                message: Any = (await stream.get_final_completion()).choices[0].message
        else:
            message = (await room.openai.chat.completions.create(**body)).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = room.use(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    check(await room.episode(message.content), room)


@STREAMED
@pytest.mark.parametrize("kept", ["by the client", "by the gateway"])
async def test_responses(room: Room, streamed: bool, kept: str) -> None:
    items: list[Any] = list(TASK.messages)
    earlier: str | None = None
    while True:
        body: Any = {"model": "m", "input": items, "tools": [{"type": "function", **FUNCTION}]}
        if kept == "by the gateway" and earlier is not None:
            body["previous_response_id"] = earlier
        if streamed:
            async with room.openai.responses.stream(**body) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await room.openai.responses.create(**body)
        earlier = response.id
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        said = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        items = [] if kept == "by the gateway" else [*items, *said]
        for call in calls:
            result = room.use(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    check(await room.episode(response.output_text), room)


@STREAMED
async def test_messages(room: Room, streamed: bool) -> None:
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    messages: list[Any] = list(TASK.messages)
    counted = []
    while True:
        body: Any = {"model": "m", "messages": messages, "tools": [tool]}
        counted.append((await room.anthropic.messages.count_tokens(**body)).input_tokens)
        if streamed:
            async with room.anthropic.messages.stream(**body, max_tokens=64) as stream:
                message = await stream.get_final_message()
        else:
            message = await room.anthropic.messages.create(**body, max_tokens=64)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        results = [(call.id, room.use(call.name, dict(call.input))) for call in calls]
        content = [{"type": "tool_result", "tool_use_id": key, "content": text} for key, text in results]
        messages.append({"role": "user", "content": content})
    episode = await room.episode("".join(block.text for block in message.content if block.type == "text"))
    check(episode, room)
    prompts = [episode.trajectory.prompt_ids(turn) for turn in episode.trajectory.turns]
    assert counted == [len(prompt) for prompt in prompts]


async def test_a_closed_stream(room: Room) -> None:
    """A client with a stop word of its own: the engine attests what it sampled until the client left."""
    messages: list[Any] = list(TASK.messages)
    read = ""
    made = await room.openai.chat.completions.create(model="m", messages=messages, stream=True)
    async with made as stream:
        async for chunk in stream:
            read += chunk.choices[0].delta.content or ""
            if len(read) > 3:
                break
    messages += [{"role": "assistant", "content": read}, {"role": "user", "content": "go on"}]
    await room.openai.chat.completions.create(model="m", messages=messages)
    episode = await room.episode("")
    trajectory = episode.trajectory
    first, *_, last = trajectory.turns
    assert room.gateway.renderer.decode(first.output_ids.tolist()).strip() == read.strip()
    assert (first.finish_reason, last.parent) == ("client_closed", 0)
    assert [turn.oldest_version() for turn in trajectory.delivered_turns()] == [0] * len(trajectory.turns)
    assert sum(row.trained for row in rows_of(trajectory, 1.0)) == trajectory.sampled_tokens()
    assert room.gateway.metrics.drifted_turns == 0


@STREAMED
async def test_completions(room: Room, streamed: bool) -> None:
    """A prompt as ids extends the recorded sequence by what comes after it."""
    encode = room.gateway.renderer.encode
    prompt = encode(f"<|im_start|>user\n{TASK.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    texts = []
    for _ in range(2):
        body: Any = {"model": "m", "prompt": prompt, "max_tokens": 8}
        if streamed:
            events = await room.openai.completions.create(**body, stream=True)
            texts.append("".join([event.choices[0].text async for event in events]))
        else:
            texts.append((await room.openai.completions.create(**body)).choices[0].text)
        turn = room.gateway.session(room.access.session_id).tree.nodes[-1].turn
        prompt = [*prompt, *turn.output_ids.tolist()]
    episode = await room.episode("".join(texts))
    episode.assert_one_line(2)
    assert [
        room.gateway.renderer.decode(turn.output_ids.tolist()) for turn in episode.trajectory.turns
    ] == texts


@pytest.mark.parametrize("tail", ["", "/v1/v1", "/openai/v1"])
async def test_a_wrong_base_url_is_told_the_right_one(room: Room, tail: str) -> None:
    root = room.access.base_url.removesuffix("/v1")
    for base in (root, root.split("/s/")[0]):
        wrong = room.openai.with_options(base_url=base + tail)
        for call in (
            wrong.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}]),
            wrong.responses.create(model="any", input="hi"),
            wrong.models.list(),
        ):
            with pytest.raises(NotFoundError, match=r"http://HOST:PORT/s/SESSION/v1 .*session.base_url"):
                await call
    claude = room.anthropic.with_options(base_url=room.access.base_url)
    with pytest.raises(anthropic.NotFoundError, match="an Anthropic client's is the same without /v1"):
        await claude.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": "hi"}])
    assert room.gateway.metrics.refusals["wrong_address"] == 7


async def test_a_wrong_key_is_told_where_the_right_one_is(room: Room) -> None:
    stranger = room.openai.with_options(api_key="sk-other")
    with pytest.raises(AuthenticationError, match=r"an episode's key is session.api_key"):
        await stranger.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
