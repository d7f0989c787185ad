"""The prefix property, for templates in the formats of the main model families."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from tests.families import FAMILIES, Family, family_renderer
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Message

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Computes <x>.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
    for name in ("calculator", "look_up")
]
WORDS = [
    "What", "is", "12", "+", "30?", "four", "apples", "é", "🍎", "#### 42", "\n", "x < y", '"so"', "\\n",
    "日本語", "```json\n{}\n```", "  ", "<b>", "don't", "\t", "3.5%", "</s", "<|im_", "$PATH",
]  # fmt: skip


def text(rng: random.Random, edges: bool = False) -> str:
    words = " ".join(rng.choices(WORDS, k=rng.randint(1, 7)))
    if edges and rng.random() < 0.2:
        return rng.choice(["\n", " ", "\n\n"]) + words + rng.choice(["\n", " ", ""])
    return words.strip() or "x"


def reply(rng: random.Random, calls: int) -> Message:
    """An assistant message in the template's form; rarely an empty one."""
    said: Message = {"role": "assistant", "content": "" if rng.random() < 0.05 else text(rng)}
    if calls and rng.random() < 0.5:
        count = rng.randint(1, calls)
        keys = ["".join(rng.choices("abcdefghij0123456789", k=rng.choice([9, 24]))) for _ in range(count)]
        said["content"] = rng.choice(["", said["content"]])
        said["tool_calls"] = [
            {
                "id": f"call_{key}" if len(key) > 9 else key,
                "type": "function",
                "function": {
                    "name": rng.choice(TOOLS)["function"]["name"],
                    "arguments": {"expression": text(rng), "n": rng.randint(-3, 9)},
                },
            }
            for key in keys
        ]
    return said


def after(rng: random.Random, family: Family, said: Message) -> list[Message]:
    """What a client may send after a reply."""
    new: list[Message] = [
        {"role": "tool", "content": text(rng, edges=True), "tool_call_id": call["id"]}
        for call in said.get("tool_calls", ())
    ]
    if new and rng.random() < 0.7:
        return new
    if not family.strict and rng.random() < 0.1:
        new.append({"role": "system", "content": text(rng)})
    if not family.strict and rng.random() < 0.1:
        new.append({"role": "user", "content": text(rng, edges=True)})
    return [*new, {"role": "user", "content": text(rng, edges=True)}]


def sampled(
    rng: random.Random,
    family: Family,
    renderer: Renderer,
    history: list[Message],
    said: Message,
    new: list[Message],
    tools: Any,
) -> tuple[list[int], bool]:
    """The ids that a model samples for `said`, split into tokens as models do: in many ways. Whether the
    template would write the reply's text like that itself."""
    prompt = renderer.render_text(history, tools, {})
    full = renderer.render_text([*history, said], tools, {}, prompt=False)
    natural = full.startswith(prompt) and not family.thinks
    body = full[len(prompt) :] if natural else "why not\n</think>\n\n" + said["content"]
    ends = [at + len(stop) for stop in family.stops if (at := body.find(stop)) >= 0]
    if natural and ends:
        body = body[: min(ends)]
    elif family.marks:
        body += family.marks.get(new[0]["role"], "")  # who speaks next, as the model guessed right
    else:
        body += family.stops[0]
    pieces = [body]
    if len(body) > 1 and rng.random() < 0.5:
        at = rng.randint(1, len(body) - 1)
        if not any(token in body and token not in body[:at] + "\0" + body[at:] for token in family.special):
            pieces = [body[:at], body[at:]]
    return [one for piece in pieces for one in renderer.encode(piece)], natural


def play(rng: random.Random, family: Family, renderer: Renderer) -> int:
    """One random conversation; how many of its prompts are the template's own, from end to end."""
    tools = TOOLS if family.calls and rng.random() < 0.6 else None
    history: list[Message] = [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 else []
    history.append({"role": "user", "content": text(rng, edges=True)})
    recorded = renderer.encode_prompt(history, tools, {})
    whole, same = True, 0
    for _ in range(rng.randint(1, 4)):
        said = reply(rng, family.calls if tools else 0)
        new = after(rng, family, said)
        output, natural = sampled(rng, family, renderer, history, said, new, tools)
        before = list(history)
        delta = renderer.encode_suffix(lambda b=before: b, said, new, tools, {}, output[-1])
        history += [said, *new]
        prompt = np.concatenate((recorded, np.asarray(output, np.int32), delta))
        assert np.array_equal(prompt[: len(recorded)], recorded)
        written = renderer.codec.decode_all(renderer.encode_prompt(history, tools, {}).tolist())
        read = renderer.codec.decode_all(prompt.tolist())
        if family.ends:
            read = read.replace(*family.ends)
        whole = whole and natural and not family.moves
        if whole:
            assert read == written
            same += 1
        else:
            assert written.endswith(renderer.codec.decode_all(delta.tolist()[1:]))
        recorded = prompt
    return same


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_the_recorded_ids_and_what_the_template_writes(name: str) -> None:
    _many(name, "tiny", 20)


@pytest.mark.parametrize("name", ["qwen25", "llama3", "mistral_v7", "deepseek_v3", "glm4", "gpt_oss"])
def test_conversations_extend_their_recorded_ids_with_a_tokenizer_of_real_size(name: str) -> None:
    _many(name, "real", 20)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), list(itertools.product(FAMILIES, ["tiny", "real"])))
def test_a_thousand_conversations_extend_their_recorded_ids(name: str, size: str) -> None:
    _many(name, size, 1000)


def _many(name: str, size: str, count: int) -> None:
    family, renderer = FAMILIES[name], family_renderer(name, size)
    rng = random.Random(f"{name} {size}")
    same = sum(play(rng, family, renderer) for _ in range(count))
    assert renderer.invalidated_templates == 0
    if not family.thinks and not family.moves:
        assert same >= count


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].moves])
def test_a_follow_up_costs_no_rendering_of_the_history(name: str) -> None:
    """Trimmed, quoted or as they are: what stands around new messages is learned, and filled in."""

    def context() -> list[Message]:
        raise AssertionError("the history is asked for")

    family, renderer = FAMILIES[name], family_renderer(name, "tiny")
    call = {"id": "callabcde", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    asked: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": ' "3"\n', "tool_call_id": "callabcde"}
    reply, new = {"role": "assistant", "content": "b"}, [{"role": "user", "content": " c "}]
    renderer.encode_suffix(context, reply, new, TOOLS if family.calls else None, {}, None)
    if family.calls:
        renderer.encode_suffix(context, asked, [result], TOOLS, {}, None)
