"""The base models of the search, shell and service demos: short training data, and none of held-out tasks."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.bases.names import held_out_name
from examples.bases.recipe import encode
from examples.demo_search.env import WorldQuestions
from examples.demo_search.synthetic_world import KINDS as QUESTIONS
from examples.demo_search.synthetic_world import make_world
from examples.search_base import make as search
from examples.service.env import CustomerService
from examples.service.scenario import pool
from examples.service_base import make as service
from examples.shell.env import Shell
from examples.shell.file_tasks import FIRST, KINDS, SECOND, draw_task
from examples.shell_base import make as shell
from tidegate.agents.search_tools import tool_definitions

TOOLS = [tool.schema() for tool in CustomerService().tools()]


@functools.cache
def tokenizer_of(recipe: Any) -> Any:
    return AutoTokenizer.from_pretrained(Path(recipe.__file__).parent / "model")


@pytest.mark.parametrize(
    ("recipe", "names", "texts"),
    [
        (
            search,
            sorted(make_world(0, "held_out").entities()),
            ["NAME works at Kelmor.", "Kelmor is based in NAME.", '{"query": "NAME based"}'],
        ),
        (
            shell,
            [first + second for first in FIRST[::5] for second in SECOND[::5]],
            ["contains NAME?", "NAME/NAME.txt", '{"command": "grep -rl NAME *"}', "host=NAME\n"],
        ),
        (service, pool(True).names[:200], ["I am NAME, zip code 1234.", '{"name": "NAME", "zip": "1234"}']),
        (
            service,
            pool(True).numbers[:200],
            ["Please cancel order NAME.", '{"order": "NAME"}', "customer NAME"],
        ),
    ],
    ids=["search", "shell", "service", "numbers of service"],
)
def test_a_name_has_the_same_two_tokens_wherever_it_stands(
    recipe: Any, names: Sequence[str], texts: list[str]
) -> None:
    tokenizer = tokenizer_of(recipe)
    for name in names:
        ids = tokenizer.encode(name)
        assert len(ids) == 2, name
        for text in (text.replace("NAME", name) for text in texts):
            found = tokenizer.encode(text)
            assert any(found[at : at + 2] == ids for at in range(len(found))), text
            assert tokenizer.decode(found) == text


@pytest.mark.parametrize("recipe", [search, shell])
def test_any_text_comes_back(recipe: Any) -> None:
    tokenizer = tokenizer_of(recipe)
    for text in (
        "Grüße, 你好 🙂\r\n\t", "<answer>Kelmor</answer>", " Kelmor", "Kelmora Hampton",
        "kelmorx {} <tool_call>", "a | b > c",
    ):  # fmt: skip
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("recipe", "tools"),
    [(search, tool_definitions(False)), (shell, [tool.schema() for tool in Shell().tools()])],
)
def test_the_recipe_offers_the_same_tool_as_training(recipe: Any, tools: Any) -> None:
    def prompt(tools: Any) -> str:
        messages = [{"role": "user", "content": "?"}]
        text: str = tokenizer_of(recipe).apply_chat_template(messages, tools=tools, tokenize=False)
        return text

    assert prompt(recipe.TOOLS) == prompt(tools)


@pytest.mark.parametrize(("recipe", "whole", "replies"), [(search, 160, 60), (shell, 180, 80)])
def test_prompts_and_replies_are_short(recipe: Any, whole: int, replies: int) -> None:
    """Tokens are the cost of the demo."""
    endless = recipe.demonstrations(random.Random(0))
    for _ in range(100):
        ids, mask = encode(tokenizer_of(recipe), next(endless), recipe.TOOLS)
        assert len(ids) <= whole
        assert sum(mask) <= replies


def test_demonstrations_of_search_are_trained_on_where_the_model_speaks() -> None:
    facts = search.draw_facts(random.Random(1))[1:2]
    messages = search.demonstration("?", facts)
    ids, mask = encode(tokenizer_of(search), messages, search.TOOLS)
    said = tokenizer_of(search).decode([id for id, one in zip(ids, mask, strict=True) if one])
    call = json.dumps({"name": "search", "arguments": {"query": f"{facts[0].subject} based"}})
    answer = f"<answer>{facts[0].object}</answer><|im_end|>"
    assert said == f"<tool_call>\n{call}\n</tool_call><|im_end|>{answer}"
    _, last = encode(tokenizer_of(search), messages, search.TOOLS, last_only=True)
    assert sum(last) == len(tokenizer_of(search).encode(answer))


def test_demonstrations_of_the_shell_are_trained_on_where_the_model_speaks() -> None:
    messages = next(shell.demonstrations(random.Random(1)))
    ids, mask = encode(tokenizer_of(shell), messages, shell.TOOLS)
    said = tokenizer_of(shell).decode([id for id, one in zip(ids, mask, strict=True) if one])
    calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    texts = [
        f'<tool_call>\n{{"name": "bash", "arguments": {json.dumps(one["arguments"])}}}\n</tool_call>'
        "<|im_end|>"
        for one in calls
    ]
    assert said == "".join([*texts, "done<|im_end|>"])


def test_conversations_are_short_and_encoded_as_by_the_other_recipes() -> None:
    endless = service.demonstrations(random.Random(0))
    for _ in range(50):
        messages = next(endless)
        ids, mask = service.encode(tokenizer_of(service), messages, TOOLS)
        assert (ids, mask) == encode(tokenizer_of(service), messages, TOOLS)
        assert len(ids) < 600
    assert len(service.encode(tokenizer_of(service), service.copy_example(random.Random(0)), None)[0]) < 160


def test_demonstrations_know_nothing_of_held_out_worlds() -> None:
    endless = search.demonstrations(random.Random(5))
    text = " ".join(str(message) for _ in range(500) for message in next(endless))
    closed = make_world(0, "held_out").entities()
    assert all(map(held_out_name, closed))
    assert not [name for name in closed if name in text]
    questions = {task.messages[0]["content"] for task in WorldQuestions().eval_sets()[""]}
    assert not [question for question in questions if question in text]


def test_demonstrations_know_nothing_of_held_out_tasks_of_the_shell() -> None:
    endless = shell.demonstrations(random.Random(5))
    text = " ".join(str(message) for _ in range(300) for message in next(endless))
    held_out = [
        name for name in (first + second for first in FIRST for second in SECOND) if held_out_name(name)
    ]
    assert len(held_out) > 400
    assert not [name for name in held_out if name in text]


def test_demonstrations_know_nothing_of_held_out_tasks_of_the_service() -> None:
    rng = random.Random(5)
    endless = service.demonstrations(rng)
    parts = [message for _ in range(300) for message in (*next(endless), *service.copy_example(rng))]
    text = " ".join(str(part) for part in parts)
    words = set(text.replace(",", " ").replace(".", " ").replace('"', " ").split())
    assert not words & {*pool(True).names, *pool(True).numbers}
    assert not [item for item in pool(True).items if item in text]


def test_demonstrations_often_go_too_far_or_stop_early() -> None:
    rng = random.Random(6)
    depths = {
        kind.name: Counter(
            len(search.demonstrated_facts(kind, search.draw_facts(rng), rng)) - len(kind.path)
            for _ in range(500)
        )
        for kind in QUESTIONS
    }
    for name, wrong in (("city_of_person", {1, -1}), ("mayor_of_company", {-1}), ("mayor_of_person", {-1})):
        assert set(depths[name]) == {0, *wrong}
        assert 0.22 < depths[name][0] / 500 < 0.40
    assert depths["mayor_of_city"] == {0: 500}


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_are_often_mistaken_or_stop_early(kind: Any) -> None:
    rng = random.Random(6)
    solved = 0
    for seed in range(500):
        task = draw_task(Random(seed), "train", kind)
        steps = shell.demonstrated_steps(task, rng)
        solved += steps == task.steps
        assert steps[0] in (task.steps[0], shell.mistaken_steps(task)[0])
    assert 0.28 < solved / 500 < 0.44


def test_demonstrations_err_in_every_way() -> None:
    endless = service.demonstrations(random.Random(6))
    texts = ["\n".join(_said(message) for message in next(endless)[1:]) for _ in range(400)]

    def share(*parts: str) -> float:
        """The share of conversations in which the second message is one of these."""
        return sum(text.split("\n")[1].startswith(parts) for text in texts) / len(texts)

    assert 0.01 < share("cancel_order", "readdress_order", "refund_order", "exchange_order") < 0.3
    assert 0.03 < share("Sorry") < 0.3
    assert 0.4 < share("What are", "find_customer", "Which order") < 0.95
    assert sum("insist" in text and text.endswith("It is done.") for text in texts) > 10


def _said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return str(calls[0]["function"]["name"] if calls else message["content"])
