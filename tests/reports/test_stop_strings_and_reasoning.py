"""An agent's stop strings end the answer; they do not end the reasoning before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from tests.fakes import Fault, Stage, staged
from tests.integration.gateway.sdk_stage import CALL, finished, opened, stage
from tests.tiny_tokenizer import make_model_dir, make_tokenizer
from tidegate.gateway.parsing.reply import PlainParser, ReplyReader, stop_search
from tidegate.gateway.rendering.renderer import Renderer

__all__ = ["stage"]

ASK: list[Any] = [{"role": "user", "content": "2 + 2?"}]
CASES = [
    ("the Question: is easy", "#### 4", ["Question:"], "#### 4", None),
    ("the Question: is easy", "#### 4 Question: next", ["Question:"], "#### 4 ", "Question:"),
    ("line\n\nline", "#### 4", ["\n\n"], "#### 4", None),
    ("line\n\nline", "#### 4\n\nMore.", ["\n\n"], "#### 4", "\n\n"),
    ("it ends with </think", "So END.", ["END"], "So ", "END"),
    ("END", "END", ["END"], "", "END"),
]


@pytest.mark.parametrize(("thought", "answer", "stop", "content", "matched"), CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_that_quotes_a_stop_string(
    stage: Stage, thought: str, answer: str, stop: list[str], content: str, matched: str | None, stream: bool
) -> None:
    """vllm-project/vllm#14399, #14170, #52393 and #53066, sgl-project/sglang#40529 and #33154"""
    access, llm = await opened(stage)
    said = stage.say(f"<think>\n{thought}\n</think>\n\n{answer}")
    if stream:
        async with llm.chat.completions.stream(model="m", messages=ASK, stop=stop) as events:
            choice: Any = (await events.get_final_completion()).choices[0]
    else:
        choice = (await llm.chat.completions.create(model="m", messages=ASK, stop=stop)).choices[0]
    assert choice.message.reasoning_content == thought
    assert (choice.message.content or "") == content
    assert choice.finish_reason == "stop"
    # The turn ends with the stop string, as if the engine had stopped there.
    [turn] = (await finished(stage, access)).turns
    ids = turn.output_ids.tolist()
    assert ids == said[: len(ids)]
    text = stage.gateway.renderer.codec.decode_all(ids)
    assert text.endswith(matched or "<|im_end|>")
    assert len(turn.logprobs) == len(ids)
    assert turn.version_spans[-1].end == len(ids)


@pytest.mark.parametrize(("thought", "answer", "stop", "content", "matched"), CASES)
async def test_messages_name_the_stop_string_of_the_answer(
    stage: Stage, thought: str, answer: str, stop: list[str], content: str, matched: str | None
) -> None:
    """sgl-project/sglang#40529: stop_reason is stop_sequence exactly if one ended the answer"""
    access, _ = await opened(stage)
    root = access.base_url.removesuffix("/v1")
    llm = await stage.stack.enter_async_context(AsyncAnthropic(base_url=root, api_key=access.api_key))
    stage.say(f"<think>\n{thought}\n</think>\n\n{answer}")
    message = await llm.messages.create(model="m", max_tokens=99, messages=ASK, stop_sequences=stop)
    assert message.content[0].type == "thinking"
    assert message.content[0].thinking == thought
    assert "".join(block.text for block in message.content if block.type == "text") == content
    assert message.stop_sequence == matched
    assert message.stop_reason == ("end_turn" if matched is None else "stop_sequence")


async def test_a_thought_that_the_prompt_opened(tmp_path: Path) -> None:
    """vllm-project/vllm#14399: templates of DeepSeek R1 and QwQ open the thought"""
    model = make_model_dir(tmp_path / "tiny", "qwen3")
    template = model / "chat_template.jinja"
    opening = "{{- '<|im_start|>assistant\\n' }}"
    source = template.read_text(encoding="utf-8")
    assert opening in source
    template.write_text(source.replace(opening, "{{- '<|im_start|>assistant\\n<think>\\n' }}"))
    async with staged(model) as stage:
        _, llm = await opened(stage)
        stage.say("Is it END? No.\n</think>\n\n#### 4 END 5")
        reply: Any = await llm.chat.completions.create(model="m", messages=ASK, stop="END")
    assert reply.choices[0].message.reasoning_content == "Is it END? No."
    assert reply.choices[0].message.content == "#### 4 "


async def test_a_thought_that_quotes_the_end_of_a_call(stage: Stage) -> None:
    """sgl-project/sglang#40529, for the end marker at which a single call ends the reply"""
    _, llm = await opened(stage)
    thought = "a call ends with </tool_call>, then comes nothing"
    stage.say(f"<think>{thought}</think>{CALL}\n{CALL}")
    tool: Any = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
    reply: Any = await llm.chat.completions.create(
        model="m", messages=ASK, tools=[tool], parallel_tool_calls=False
    )
    assert reply.choices[0].message.reasoning_content == thought
    assert len(reply.choices[0].message.tool_calls) == 1


async def test_an_engine_is_stopped_where_the_answer_stops(stage: Stage) -> None:
    """vllm-project/vllm#14399: the engine samples no tokens beyond those in transit"""
    access, llm = await opened(stage)
    end = stage.gateway.renderer.encode("<think>END?</think>It is 4 END")
    said = stage.say("<think>END?</think>It is 4 END" + " and so on" * 50, ended=False)
    assert said[: len(end)] == end
    stage.engine.faults.append(Fault("pause", len(end)))  # goes on when it is aborted
    reply = await llm.chat.completions.create(model="m", messages=ASK, stop="END")
    assert reply.choices[0].message.content == "It is 4 "
    [turn] = (await finished(stage, access)).turns
    assert turn.output_ids.tolist() == end


async def test_a_reply_that_was_interrupted_within_its_thought(stage: Stage) -> None:
    """sgl-project/sglang#40529, with an engine that is lost"""
    _, llm = await opened(stage)
    stage.say("<think>END?</think>It is 4 END 5")
    stage.engine.faults.append(Fault("break", 5))
    stage.engine.replies.append(stage.engine.replies[0][5:])
    reply: Any = await llm.chat.completions.create(model="m", messages=ASK, stop="END")
    assert reply.choices[0].message.reasoning_content == "END?"
    assert reply.choices[0].message.content == "It is 4 "


def test_the_search_for_stop_strings_is_exact_at_every_cut() -> None:
    """lm-evaluation-harness#3700: stop strings that straddle tokens"""
    renderer = Renderer(make_tokenizer("qwen3"))
    text = "<think>Question: a</think>\n\nb Question: c Question: d"
    ids = renderer.encode(text)
    ends = set()
    for size in range(1, 6):
        search = stop_search(
            lambda: ReplyReader(renderer.decode, ["Question:"], PlainParser(), thought=False)
        )
        found = [search(ids[:end]) for end in range(size, len(ids) + size, size)]
        ends |= {end for end in found if end is not None}
    assert [renderer.decode(ids[:end]) for end in ends] == ["<think>Question: a</think>\n\nb Question:"]


@pytest.mark.parametrize("stop", ["own fox", "\nUser:", "🍎🍎", "D"])
@pytest.mark.parametrize("thought", ["", "<think>own fox\nUser: 🍎🍎 D</think>"])
async def test_no_part_of_a_stop_string_is_streamed(stage: Stage, stop: str, thought: str) -> None:
    """vllm-project/vllm#3574, SharpAI/SwiftLM#126, mzau/mlx-knife#68, ggml-org/llama.cpp#9867 and
    smg-project/smg#2203: stop strings of several tokens, and beginnings of one that do not become one"""
    _, llm = await opened(stage)
    answer = f"So {stop[:-1]} it is {stop[:-1]}"
    stage.say(f"{thought}{answer}{stop}{stop} more")
    chunks = await llm.chat.completions.create(model="m", messages=ASK, stop=stop, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    first = f"{answer}{stop}".find(stop)
    assert text == f"{answer}{stop}"[:first]
    stage.say(f"{thought}{answer} end")
    chunks = await llm.chat.completions.create(model="m", messages=[*ASK, *ASK], stop=stop, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    whole = f"{answer} end"
    assert text == whole.partition(stop)[0]
