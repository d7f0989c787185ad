"""The search demo's base model: its training data, and that none of it is of the held-out world."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.bases.recipe import encode
from examples.search_base import make as recipe
from tidegate.agents.search_tools import tool_definitions
from tidegate.envs.names import held_out_name
from tidegate.envs.search.search_qa import SearchQA
from tidegate.envs.search.synthetic_world import KINDS, make_world

MODEL = Path(recipe.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_a_name_has_the_same_two_tokens_wherever_it_stands(tokenizer: Any) -> None:
    for name in sorted(make_world(0, "held_out").entities()):
        ids = tokenizer.encode(name)
        assert len(ids) == 2, name
        for text in (
            f"{name} works at Kelmor.",
            f"Kelmor is based in {name}.",
            f'{{"query": "{name} based"}}',
        ):
            found = tokenizer.encode(text)
            assert any(found[at : at + 2] == ids for at in range(len(found))), text
    for text in ("Grüße, 你好 🙂\r\n\t", "<answer>Kelmor</answer>", " Kelmor", "Kelmora Hampton"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_recipe_and_the_agent_offer_the_same_tool(tokenizer: Any) -> None:
    def prompt(tools: Any) -> str:
        return tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tools=tools, tokenize=False)

    assert prompt(recipe.TOOLS) == prompt(tool_definitions(False))


def test_prompts_and_replies_are_short(tokenizer: Any) -> None:
    """Tokens are the cost of the demo."""
    endless = recipe.demonstrations(random.Random(0))
    for _ in range(100):
        ids, mask = encode(tokenizer, next(endless), recipe.TOOLS)
        assert len(ids) <= 160
        assert sum(mask) <= 60


def test_demonstrations_are_trained_on_where_the_model_speaks(tokenizer: Any) -> None:
    facts = recipe.draw_facts(random.Random(1))[1:2]
    messages = recipe.demonstration("?", facts)
    ids, mask = encode(tokenizer, messages, recipe.TOOLS)
    said = tokenizer.decode([id for id, one in zip(ids, mask, strict=True) if one])
    call = json.dumps({"name": "search", "arguments": {"query": f"{facts[0].subject} based"}})
    answer = f"<answer>{facts[0].object}</answer><|im_end|>"
    assert said == f"<tool_call>\n{call}\n</tool_call><|im_end|>{answer}"
    _, last = encode(tokenizer, messages, recipe.TOOLS, last_only=True)
    assert sum(last) == len(tokenizer.encode(answer))


def test_demonstrations_know_nothing_of_held_out_worlds() -> None:
    endless = recipe.demonstrations(random.Random(5))
    text = " ".join(str(message) for _ in range(500) for message in next(endless))
    closed = make_world(0, "held_out").entities()
    assert all(map(held_out_name, closed))
    assert not [name for name in closed if name in text]
    questions = {task.messages[0]["content"] for task in SearchQA().eval_sets()[""]}
    assert not [question for question in questions if question in text]


def test_demonstrations_often_go_too_far_or_stop_early() -> None:
    rng = random.Random(6)
    depths = {
        kind.name: Counter(
            len(recipe.demonstrated_facts(kind, recipe.draw_facts(rng), rng)) - len(kind.path)
            for _ in range(500)
        )
        for kind in KINDS
    }
    for name, wrong in (("city_of_person", {1, -1}), ("mayor_of_company", {-1}), ("mayor_of_person", {-1})):
        assert set(depths[name]) == {0, *wrong}
        assert 0.22 < depths[name][0] / 500 < 0.40
    assert depths["mayor_of_city"] == {0: 500}
