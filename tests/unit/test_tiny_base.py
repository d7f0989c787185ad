"""The tiny base model: its training data, and a template in which each history extends the last one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.bases.recipe import encode
from examples.tiny_base import make as recipe
from tidegate.agents.solver import TOOLS
from tidegate.envs.arithmetic import TEMPLATES, Arithmetic

MODEL = Path(recipe.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_digits_stand_alone_and_any_text_comes_back(tokenizer: Any) -> None:
    assert tokenizer.tokenize("123 + 45") == ["1", "2", "3", "Ġ+Ġ", "4", "5"]
    for text in ("12 apples & 3.50 $", "Grüße, 你好 🙂\r\n\t", "<tool_call>\n{}\n</tool_call>", " leading"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tool_calls_survive_the_decoding_of_replies(tokenizer: Any) -> None:
    ids = tokenizer.encode('<tool_call>\n{"name": "calculator"}\n</tool_call><|im_end|>')
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == '<tool_call>\n{"name": "calculator"}\n</tool_call>'


def test_prompts_and_replies_are_short(tokenizer: Any) -> None:
    """Tokens are the cost of the demo."""
    rng = random.Random(0)
    environment = Arithmetic()
    tasks = [environment.train_task(index) for index in range(200)] + [
        task for tasks in environment.eval_sets().values() for task in tasks[:50]
    ]
    prompts = [render(tokenizer, task.messages, add_generation_prompt=True) for task in tasks]
    assert max(map(len, prompts)) <= 70
    for _ in range(100):
        _, mask = encode(tokenizer, next(recipe.demonstrations(rng)), TOOLS)
        assert sum(mask) <= 60


def render(tokenizer: Any, messages: Any, **more: Any) -> list[int]:
    return tokenizer.apply_chat_template(list(messages), tools=TOOLS, return_dict=False, **more)


def call(expression: str, arguments_as_text: bool = False) -> dict[str, Any]:
    arguments: Any = {"expression": expression}
    arguments = json.dumps(arguments) if arguments_as_text else arguments
    function = {"name": "calculator", "arguments": arguments}
    return {"id": "c", "type": "function", "function": function}


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [call("1 + 2", True)]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "assistant", "content": "Thinking.", "tool_calls": [call("3 / 4"), call("3 * 4")]},
    {"role": "tool", "tool_call_id": "c", "content": "0.75"},
    {"role": "tool", "tool_call_id": "c", "content": "12"},
    {"role": "assistant", "content": "#### 12"},
    {"role": "user", "content": "And 3 + 4?"},
    {"role": "assistant", "content": "#### 7"},
]


@pytest.mark.parametrize("skip_system", [False, True])
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_history_is_a_prefix_of_its_continuation(
    tokenizer: Any, with_tools: bool, skip_system: bool
) -> None:
    messages = HISTORY[skip_system:]
    tools = TOOLS if with_tools else None

    def text(end: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:end], tools=tools, add_generation_prompt=prompt, tokenize=False
        )

    whole = text(len(messages), False)
    for end, message in enumerate(messages):
        if message["role"] == "assistant":
            assert whole.startswith(text(end, True))
            assert whole.startswith(text(end + 1, False))


def test_what_a_rendered_history_looks_like(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(HISTORY[:7], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert (
        text
        == """<|im_start|>system
Be brief.
tools: calculator(expression)<|im_end|>
<|im_start|>user
1 + 2?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "calculator", "arguments": {"expression": "1 + 2"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
3
</tool_response><|im_end|>
<|im_start|>assistant
Thinking.
<tool_call>
{"name": "calculator", "arguments": {"expression": "3 / 4"}}
</tool_call>
<tool_call>
{"name": "calculator", "arguments": {"expression": "3 * 4"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
0.75
</tool_response>
<tool_response>
12
</tool_response><|im_end|>
<|im_start|>assistant
"""
    )


def test_demonstrations_are_trained_on_where_the_model_speaks(tokenizer: Any) -> None:
    ids, mask = encode(tokenizer, recipe.demonstration("1 + 2?", "1 + 2"), TOOLS)
    said = tokenizer.decode([id for id, one in zip(ids, mask, strict=True) if one])
    assert said == (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call><|im_end|>'
        "#### 3<|im_end|>"
    )


def test_demonstrations_are_often_wrong_and_never_of_held_out_problems() -> None:
    endless = recipe.demonstrations(random.Random(5))
    environment = Arithmetic()
    closed = {task.messages[0]["content"] for tasks in environment.eval_sets().values() for task in tasks}
    shown = [next(endless)[0]["content"] for _ in range(3000)]
    assert not closed & set(shown)
    rng = random.Random(6)
    problems = [recipe.draw_problem(rng) for _ in range(3000)]
    right = sum(recipe.demonstrated_expression(problem, rng) == problem.expression for problem in problems)
    assert 0.45 < right / len(problems) < 0.53
    for template in TEMPLATES:  # no template's right expression is out of reach, and none is sure
        one = next(problem for problem in problems if problem.template is template)
        shown = [recipe.demonstrated_expression(one, rng) for _ in range(400)]
        assert 0.38 < shown.count(one.expression) / 400 < 0.60
