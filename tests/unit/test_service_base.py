"""The customer-service demo's base model: its training data, and that none of it is of held-out tasks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.bases import recipe as bases
from examples.service_base import make as recipe
from tidegate.envs.customer_service.customer_service import CustomerService
from tidegate.envs.customer_service.scenario import pool

MODEL = Path(recipe.__file__).parent / "model"
TOOLS = [tool.schema() for tool in CustomerService().tools()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_names_and_numbers_have_the_same_two_tokens_wherever_they_stand(tokenizer: Any) -> None:
    words = pool(True)
    for name, number in zip(words.names[:200], words.numbers[:200], strict=True):
        for word, texts in (
            (name, (f"I am {name}, zip code 1234.", f'{{"name": "{name}", "zip": "1234"}}')),
            (number, (f"Please cancel order {number}.", f'{{"order": "{number}"}}', f"customer {number}")),
        ):
            ids = tokenizer.encode(word)
            assert len(ids) == 2, word
            for text in texts:
                found = tokenizer.encode(text)
                assert any(found[at : at + 2] == ids for at in range(len(found))), text
                assert tokenizer.decode(found) == text


def test_conversations_are_short_and_encoded_as_by_the_other_recipes(tokenizer: Any) -> None:
    endless = recipe.demonstrations(random.Random(0))
    for _ in range(50):
        messages = next(endless)
        ids, mask = recipe.encode(tokenizer, messages, TOOLS)
        assert (ids, mask) == bases.encode(tokenizer, messages, TOOLS)
        assert len(ids) < 600
    assert len(recipe.encode(tokenizer, recipe.copy_example(random.Random(0)), None)[0]) < 160


def test_demonstrations_know_nothing_of_held_out_tasks() -> None:
    rng = random.Random(5)
    endless = recipe.demonstrations(rng)
    parts = [message for _ in range(300) for message in (*next(endless), *recipe.copy_example(rng))]
    text = " ".join(str(part) for part in parts)
    words = set(text.replace(",", " ").replace(".", " ").replace('"', " ").split())
    assert not words & {*pool(True).names, *pool(True).numbers}
    assert not [item for item in pool(True).items if item in text]


def test_demonstrations_err_in_every_way() -> None:
    endless = recipe.demonstrations(random.Random(6))
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
