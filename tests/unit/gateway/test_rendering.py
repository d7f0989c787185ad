"""Follow-up prompts extend the recorded ids exactly, with the text of the model's own template."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.renderer import Renderer, Unrenderable
from tidegate.types import Message

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
WORDS = ["What", "is", "12", "+", "30?", "four", "apples", "é", "🍎", "#### 42", "\n", "x < y"]


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))).strip()


def user(rng: random.Random) -> Message:
    return {"role": "user", "content": text(rng)}


def reply(rng: random.Random, calls: bool) -> Message:
    """An assistant message in the template's form."""
    if not calls or rng.random() < 0.5:
        return {"role": "assistant", "content": text(rng)}
    made = [
        {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": text(rng)}},
        }
        for n in range(rng.randint(1, 2))
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def after(rng: random.Random, said: Message) -> list[Message]:
    """What a client may send after a reply."""
    results: list[Message] = [
        {"role": "tool", "content": text(rng), "tool_call_id": call["id"]}
        for call in said.get("tool_calls", ())
    ]
    if results and rng.random() < 0.7:
        return results
    return [*results, user(rng)]


def sampled_form(renderer: Renderer, history: list[Message], said: Message, tools: Any) -> list[int]:
    """The ids that the template itself would write for a reply, its end of turn included."""
    ids = renderer.encode_prompt(history, tools, {}).tolist()
    full = renderer.encode(renderer.template.render([*history, said], tools, {}, prompt=False))
    assert full[: len(ids)] == ids
    end = len(full) - full[::-1].index(renderer.past_turn_end_ids[0])
    return full[len(ids) : end]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "counting"])
def test_random_histories_are_what_the_template_writes(family: str) -> None:
    """Where the model writes exactly what the template would, so does the extended prompt."""
    renderer = Renderer(make_tokenizer(family))
    rng = random.Random(family)
    for _ in range(120):
        tools = TOOLS if family != "counting" and rng.random() < 0.5 else None
        history: list[Message] = [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 else []
        history.append(user(rng))
        prompt = renderer.encode_prompt(history, tools, {}).tolist()
        for _ in range(rng.randint(1, 5)):
            said = reply(rng, calls=bool(tools))
            output = sampled_form(renderer, history, said, tools)
            new = after(rng, said)
            before = list(history)
            delta = renderer.encode_suffix(lambda b=before: b, said, new, tools, {}, output[-1])
            prompt = [*prompt, *output, *delta.tolist()]
            history += [said, *new]
            assert prompt == renderer.encode_prompt(history, tools, {}).tolist()


@pytest.mark.parametrize(("family", "asked"), [("qwen2", False), ("qwen3", False), ("counting", True)])
def test_the_history_is_asked_for_only_where_the_template_looks_back(family: str, asked: bool) -> None:
    renderer = Renderer(make_tokenizer(family))
    times = 0

    def context() -> list[Message]:
        nonlocal times
        times += 1
        return [{"role": "user", "content": "a"}]

    said = {"role": "assistant", "content": "b"}
    renderer.encode_suffix(context, said, [{"role": "user", "content": "c"}], None, {}, None)
    assert bool(times) == asked


def test_a_thinking_template_keeps_the_recorded_thoughts() -> None:
    """Qwen3's template drops old thoughts; the recorded ids keep them, and the rest is what it writes."""
    renderer = Renderer(make_tokenizer("qwen3"))
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."}
    delta = renderer.encode_suffix(
        lambda: [{"role": "user", "content": "a"}], said, [{"role": "user", "content": "b"}], None, {}, 2
    )
    assert decoded(renderer, delta) == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def decoded(renderer: Renderer, ids: Any) -> str:
    return renderer.codec.decode_all(list(ids))


@pytest.mark.parametrize("last", [65, None])
def test_a_reply_without_its_end_gets_one_as_prompt_tokens(last: int | None) -> None:
    renderer = Renderer(make_tokenizer("qwen2"))
    said = {"role": "assistant", "content": "cut"}
    delta = renderer.encode_suffix(list, said, [{"role": "user", "content": "go on"}], None, {}, last)
    assert decoded(renderer, delta) == (
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_reply_that_is_asked_to_be_followed_by_another() -> None:
    renderer = Renderer(make_tokenizer("qwen2"))
    delta = renderer.encode_suffix(list, {"role": "assistant", "content": "a"}, [], None, {}, 2)
    assert decoded(renderer, delta) == "\n<|im_start|>assistant\n"


def test_tool_results_share_one_user_turn() -> None:
    renderer = Renderer(make_tokenizer("qwen3"))
    results = [{"role": "tool", "content": str(n), "tool_call_id": f"c{n}"} for n in (1, 2)]
    delta = renderer.encode_suffix(list, {"role": "assistant", "content": ""}, results, TOOLS, {}, 2)
    assert decoded(renderer, delta) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_a_verbatim_reply_is_said_so() -> None:
    renderer = Renderer(make_tokenizer("shouting"))
    with pytest.raises(Unrenderable, match="unchanged"):
        renderer.encode_suffix(list, {"role": "assistant", "content": "a"}, [], None, {}, 2)


def test_messages_that_the_template_refuses_are_refused() -> None:
    renderer = Renderer(make_tokenizer("mistral"))
    with pytest.raises(ApiError, match="a tool result without a call") as raised:
        renderer.encode_prompt([{"role": "tool", "content": "1"}], None, {})
    assert raised.value.status == 400


def test_options_reach_the_template() -> None:
    renderer = Renderer(make_tokenizer("qwen3"))
    ids = renderer.encode_prompt([{"role": "user", "content": "a"}], None, {"enable_thinking": False})
    assert decoded(renderer, ids).endswith("assistant\n<think>\n\n</think>\n\n")


def test_ids_of_a_prompt_are_numpy_int32() -> None:
    renderer = Renderer(make_tokenizer("qwen2"))
    ids = renderer.encode_prompt([{"role": "user", "content": "a"}], None, {})
    assert ids.dtype == np.int32
    assert renderer.encode_prompt([{"role": "user", "content": "a"}], None, {}) is ids
