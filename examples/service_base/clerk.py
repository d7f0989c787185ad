"""A scripted agent of the customer-service environment: it follows the rules, or errs on purpose.

`Clerk().reply(messages)` returns the next assistant message of a conversation, from its messages alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from examples.service.scenario import ALLOWED_STATUS, Kind

Message = dict[str, Any]

ASK_IDENTITY = "What are your name and zip code?"
ASK_ORDER = "Which order is it?"
DONE = "It is done."
REFUSAL = "Sorry, this is not possible."
PRICE = "It cost {price} euros."
_WISHES: dict[Kind, str] = {
    "cancel": r"cancel (?:order (\d+)|my order)",
    "readdress": r"send (?:order (\d+)|my order) to (.+)\.",
    "refund": r"refund (?:order (\d+)|my order)",
    "exchange": r"exchange (?:order (\d+)|my order) for a (.+)\.",
    "price": r"what did (?:order (\d+)|my order) cost",
}
_CHANGES = {
    "cancel": "cancel_order",
    "readdress": "readdress_order",
    "refund": "refund_order",
    "exchange": "exchange_order",
}


@dataclass(frozen=True, slots=True)
class Mistakes:
    """Probability of each mistake, at each occasion."""

    no_identity: float = 0.0
    """Acts on the wish without asking who the customer is."""
    idle: float = 0.0
    """Claims that a change was made that was not."""
    no_look: float = 0.0
    """Changes an order without looking at it."""
    too_strict: float = 0.0
    """Refuses what is allowed."""
    too_lax: float = 0.0
    """Makes a change that is forbidden."""
    no_stock: float = 0.0
    """Exchanges without checking the stock."""
    gives_in: float = 0.0
    """Makes the change when the customer insists."""


@dataclass(slots=True)
class _Case:
    """What a conversation contains so far."""

    kind: Kind | None = None
    order: str | None = None
    target: str = ""
    identity: tuple[str, str] | None = None
    customer: str | None = None
    unknown_customer: bool = False
    found: tuple[str, str] | None = None
    """Price and status of the order."""
    unknown_order: bool = False
    stock: str | None = None
    changed: bool = False
    insists: bool = False


@dataclass(slots=True)
class Clerk:
    """Chooses replies by the rules, with mistakes."""

    mistakes: Mistakes = field(default_factory=Mistakes)
    rng: Random = field(default_factory=lambda: Random(0))

    def reply(self, messages: Sequence[Message]) -> Message:
        """Returns the next assistant message: a tool call, or a message to the customer."""
        case = read_conversation(messages)
        err = self._err
        if case.kind is None:
            return _message(ASK_ORDER)
        if case.changed:
            return _message(DONE)
        if case.insists:
            return self._change(case) if err(self.mistakes.gives_in) else _message(REFUSAL)
        if case.unknown_customer or case.unknown_order:
            return self._refuse(case)
        if case.customer is None:
            return self._identify(case)
        if case.order is None:
            return _message(ASK_ORDER)
        if case.found is None:
            if case.kind != "price" and err(self.mistakes.no_look):
                return self._change(case)
            return _tool_call("find_order", customer=case.customer, order=case.order)
        return self._decide(case, *case.found)

    def _identify(self, case: _Case) -> Message:
        if case.identity is not None:
            name, zip_code = case.identity
            return _tool_call("find_customer", name=name, zip=zip_code)
        if self._err(self.mistakes.no_identity):
            return _message(REFUSAL) if self.rng.random() < 0.5 else self._change(case)
        return _message(ASK_IDENTITY)

    def _decide(self, case: _Case, price: str, status: str) -> Message:
        """Grants or refuses a wish about an order that was looked up."""
        assert case.kind is not None
        if status not in ALLOWED_STATUS[case.kind]:
            return self._refuse(case)
        if case.kind == "price":
            strict = self._err(self.mistakes.too_strict)
            return _message(REFUSAL if strict else PRICE.format(price=price))
        if case.kind == "exchange" and case.stock is None and not self._err(self.mistakes.no_stock):
            return _tool_call("find_item", item=case.target)
        if case.stock == "sold out":
            return self._refuse(case)
        return _message(REFUSAL) if self._err(self.mistakes.too_strict) else self._change(case)

    def _refuse(self, case: _Case) -> Message:
        return self._change(case) if self._err(self.mistakes.too_lax) else _message(REFUSAL)

    def _change(self, case: _Case) -> Message:
        """Makes the change, or claims to have made it where there is nothing to change."""
        if case.order is None:
            return _message(ASK_ORDER)
        if case.kind is None or case.kind == "price" or self._err(self.mistakes.idle):
            return _message(DONE)
        target = {"readdress": {"address": case.target}, "exchange": {"item": case.target}}
        return _tool_call(_CHANGES[case.kind], order=case.order, **target.get(case.kind, {}))

    def _err(self, probability: float) -> bool:
        return self.rng.random() < probability


def read_conversation(messages: Sequence[Message]) -> _Case:
    """Reads a conversation. A further wish keeps the customer, and nothing else, of the earlier one."""
    case = _Case()
    for message, tool in _with_tools(messages):
        text = str(message["content"])
        if message["role"] == "user":
            _read_user_message(case, text)
        elif tool == "find_customer":
            found = re.search(r"customer (\d+)", text)
            case.customer = found and found[1]
            case.unknown_customer = found is None
        elif tool == "find_order":
            found = re.search(r", (\d+) euros, (\w+)", text)
            case.found = found and (found[1], found[2])
            case.unknown_order = found is None
        elif tool == "find_item":
            case.stock = text if text in ("in stock", "sold out") else "sold out"
        elif tool is not None:
            case.changed = True
    return case


def _read_user_message(case: _Case, text: str) -> None:
    if identity := re.search(r"I am (\w+), zip code (\d+)", text):
        case.identity = (identity[1], identity[2])
    if order := re.search(r"It is order (\d+)", text):
        case.order = order[1]
    for kind, words in _WISHES.items():
        if wish := re.search(words, text, re.IGNORECASE):
            case.kind, case.order = kind, wish[1]
            case.target = wish[2] if wish.re.groups > 1 else ""
            case.found = case.stock = None
            case.unknown_order = case.changed = False
    case.insists = "I insist" in text


def _with_tools(messages: Sequence[Message]) -> Iterator[tuple[Message, str | None]]:
    """Yields the messages of users and tools, those of tools with the tool's name."""
    names: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            names = [call["function"]["name"] for call in message.get("tool_calls") or []]
        elif message["role"] == "tool":
            yield message, names.pop(0)
        elif message["role"] == "user":
            yield message, None


def _message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _tool_call(name: str, /, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }
