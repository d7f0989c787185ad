"""The shell demo's base model: its training data, and that none of it is of the held-out tasks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.bases.recipe import encode
from examples.shell_base import make as recipe
from tidegate.envs.names import held_out_name
from tidegate.envs.shell.shell import Shell
from tidegate.envs.shell.tasks import FIRST, KINDS, SECOND, draw_task

MODEL = Path(recipe.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_a_name_has_the_same_two_tokens_wherever_it_stands(tokenizer: Any) -> None:
    for name in (first + second for first in FIRST[::5] for second in SECOND[::5]):
        ids = tokenizer.encode(name)
        assert len(ids) == 2, name
        for text in (
            f"contains {name}?",
            f"{name}/{name}.txt",
            f'{{"command": "grep -rl {name} *"}}',
            f"host={name}\n",
        ):
            found = tokenizer.encode(text)
            assert any(found[at : at + 2] == ids for at in range(len(found))), text
    for text in ("Grüße, 你好 🙂\r\n\t", "kelmorx {} <tool_call>", "a | b > c"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_recipe_and_the_environment_offer_the_same_tool(tokenizer: Any) -> None:
    def prompt(tools: Any) -> str:
        return tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tools=tools, tokenize=False)

    assert prompt(recipe.TOOLS) == prompt([tool.schema() for tool in Shell().tools()])


def test_prompts_and_replies_are_short(tokenizer: Any) -> None:
    """Tokens are the cost of the demo."""
    endless = recipe.demonstrations(random.Random(0))
    for _ in range(100):
        ids, mask = encode(tokenizer, next(endless), recipe.TOOLS)
        assert len(ids) <= 180
        assert sum(mask) <= 80


def test_demonstrations_know_nothing_of_held_out_tasks() -> None:
    endless = recipe.demonstrations(random.Random(5))
    text = " ".join(str(message) for _ in range(300) for message in next(endless))
    held_out = [
        name for name in (first + second for first in FIRST for second in SECOND) if held_out_name(name)
    ]
    assert len(held_out) > 400
    assert not [name for name in held_out if name in text]


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_are_often_mistaken_or_stop_early(kind: Any) -> None:
    rng = random.Random(6)
    solved = 0
    for seed in range(500):
        task = draw_task(Random(seed), "train", kind)
        steps = recipe.demonstrated_steps(task, rng)
        solved += steps == task.steps
        assert steps[0] in (task.steps[0], recipe.mistaken_steps(task)[0])
    assert 0.28 < solved / 500 < 0.44


def test_demonstrations_are_trained_on_where_the_model_speaks(tokenizer: Any) -> None:
    messages = next(recipe.demonstrations(random.Random(1)))
    ids, mask = encode(tokenizer, messages, recipe.TOOLS)
    said = tokenizer.decode([id for id, one in zip(ids, mask, strict=True) if one])
    calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    texts = [
        f'<tool_call>\n{{"name": "bash", "arguments": {json.dumps(one["arguments"])}}}\n</tool_call>'
        "<|im_end|>"
        for one in calls
    ]
    assert said == "".join([*texts, "done<|im_end|>"])
