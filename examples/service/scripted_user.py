"""The simulated user that follows a script: states wishes, answers questions, and insists."""

from __future__ import annotations

import re
from typing import Any

from examples.service.scenario import Kind, UserScenario, Wish

ORDERED: dict[Kind, str] = {
    "cancel": "please cancel {order}.",
    "readdress": "please send {order} to {target}.",
    "refund": "please refund {order}.",
    "exchange": "please exchange {order} for a {target}.",
    "price": "what did {order} cost?",
}
"""Kind of wish → how the user words it."""
INSISTENCE = "I insist. Please make an exception."
UNCLEAR = "I do not understand."
PATIENCE = 3
"""Replies without use after which the user gives up."""
_SENTENCE = re.compile(r"[^.!?]*[.!?]*")
_REQUEST = re.compile(r"\?|\bplease (provide|tell|give|confirm|share|state)\b", re.IGNORECASE)
_CONFIRMATION = re.compile(r"\b(shall|should i|do you want|would you like|confirm|proceed)\b", re.IGNORECASE)
_CLOSING = re.compile(r"\belse\b", re.IGNORECASE)
_REFUSAL = re.compile(
    r"\b(cannot|can't|can not|unable|not (possible|allowed|able|permitted)|won't|refuse)\b", re.IGNORECASE
)
_ASKED = {
    "identity": re.compile(r"\b(name|zip|who)\b", re.IGNORECASE),
    "order": re.compile(r"\border\b", re.IGNORECASE),
    "target": re.compile(r"\b(address|where|item)\b", re.IGNORECASE),
}


def opening(scenario: UserScenario) -> str:
    """Returns the user's first message."""
    first = scenario.wishes[0]
    order = "my order" if scenario.nameless else f"order {first.order}"
    text = _worded(first, order)
    return f"{_introduction(scenario)} {text}" if scenario.introduced else text


def refuses(reply: str) -> bool:
    """Returns whether an agent's reply refuses something."""
    return _REFUSAL.search(reply) is not None


class ScriptedUser:
    """The user of one episode. The first message is `opening`; `answer` gives those that follow.

    Args:
        scenario: The scenario of the episode.
    """

    def __init__(self, scenario: UserScenario) -> None:
        self._scenario = scenario
        self._wish = 0
        self._insists = scenario.insists
        self._useless = 0
        self.gave_up = False
        """Whether the user ended the conversation because the agent's replies were of no use."""
        self._given = {"target"} | ({"identity"} if scenario.introduced else set())
        if not scenario.nameless:
            self._given.add("order")

    def answer(self, reply: str) -> str | None:
        """Returns the user's answer to a reply of the agent; None: the user ends the conversation."""
        request = " ".join(part for part in _SENTENCE.findall(reply) if _asks(part))
        if request:
            return self._informed(request)
        if not reply.strip():
            return self._unclear()
        if refuses(reply) and self._insists:
            self._insists = False
            return INSISTENCE
        self._wish += 1
        if self._wish == len(self._scenario.wishes):
            return None
        wish = self._scenario.wishes[self._wish]
        return f"Thanks. And {_worded(wish, f'order {wish.order}', capital=False)}"

    def _informed(self, request: str) -> str | None:
        wish = self._scenario.wishes[self._wish]
        texts: dict[str, Any] = {
            "identity": _introduction(self._scenario),
            "order": f"It is order {wish.order}.",
            "target": f"{wish.target}." if wish.target else "",
        }
        asked = [name for name, words in _ASKED.items() if words.search(request) and texts[name]]
        if _CONFIRMATION.search(request) and self._given.issuperset(asked):
            return self._patient("Yes, please.")
        if not asked:
            return self._unclear()
        news = not self._given.issuperset(asked)
        self._given.update(asked)
        text = " ".join(texts[name] for name in asked)
        return text if news else self._patient(text)

    def _unclear(self) -> str | None:
        return self._patient(UNCLEAR)

    def _patient(self, text: str) -> str | None:
        self._useless += 1
        self.gave_up = self._useless >= PATIENCE
        return None if self.gave_up else text


def _asks(sentence: str) -> bool:
    return _REQUEST.search(sentence) is not None and _CLOSING.search(sentence) is None


def _introduction(scenario: UserScenario) -> str:
    return f"I am {scenario.name}, zip code {scenario.zip_code}."


def _worded(wish: Wish, order: str, *, capital: bool = True) -> str:
    text = ORDERED[wish.kind].format(order=order, target=wish.target)
    return text[0].upper() + text[1:] if capital else text
