"""The environment of the service demo: an agent serves a shop's customers, in the manner of τ-bench.

Yao et al. 2024 describe τ-bench: tools that read and change a database, rules, a simulated user, and a
reward for the final state of the database. Here everything is generated.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from examples.service.database import Database
from examples.service.model_user import ModelUser
from examples.service.scenario import ScenarioSet, UserScenario, make_scenario
from examples.service.scripted_user import ScriptedUser, opening, refuses
from tidegate.envs.base import Done, Environment
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.tools import ToolError, tool
from tidegate.loading import construct
from tidegate.types import Message, Task

RULES = """You are the service desk of a shop. Before anything else, find the customer by name and zip code.
Serve only orders of this customer, and look at an order before you change it or refuse.
Cancel or readdress pending orders only. Refund or exchange delivered orders only.
Exchange only for an item in stock. \
Refuse everything else, even if the customer insists: it is not possible."""
"""System message of every task."""
HELD_OUT = {"": 200, "combinations": 100}
"""Held-out set → its number of tasks."""
MOST_REPLIES = 20
"""Replies of the agent after which a simulated user ends the conversation."""


@dataclass(slots=True)
class ServiceEpisode:
    """State of an episode."""

    scenario: UserScenario
    database: Database
    user: ScriptedUser
    """Unused if a model plays the user."""
    said: list[Message]
    """The user's messages and the agent's replies to the user."""
    _: KW_ONLY
    customer: str | None = None
    """Number of the customer that was found last."""
    searched: bool = False
    """Whether a customer was searched for."""
    looked: set[str] = field(default_factory=set)
    """Orders of the customer that was found which were looked at, whether they exist or not."""
    blind: bool = False
    """Whether an order was changed that had not been looked at."""
    over: bool = False
    """Whether the user ended the conversation without giving up."""

    @property
    def replies(self) -> list[str]:
        """The agent's replies to the user."""
        return [message["content"] for message in self.said if message["role"] == "assistant"]


def resolved(state: ServiceEpisode) -> Grade:
    """Reward function: 1 if the database is as it should be, and the checks of the rules were made.

    The user must also be told each price that was asked for and may be stated, and that a forbidden wish is
    refused; and the user must have ended the conversation.
    """
    scenario = state.scenario
    right = state.database == scenario.final_database()
    refused = any(map(refuses, state.replies))
    forbidden = any(wish.forbidden for wish in scenario.wishes)
    told = all(any(re.search(rf"\b{fact}\b", reply) for reply in state.replies) for fact in scenario.facts())
    told = told and (refused or not forbidden)
    orders = [wish.order for wish in scenario.wishes if wish.forbidden != "identity"]
    checked = state.searched and not state.blind and state.looked.issuperset(orders)
    metrics = {
        "right_database": float(right),
        "rule_checks": float(checked),
        "user_told": float(told),
        "conversation_ended": float(state.over),
    }
    return Grade(float(right and checked and told and state.over), metrics)


class CustomerService(Environment):
    """Conversations with customers of a shop. An agent reads and changes the shop's database with tools.

    The customer wishes to cancel, readdress, refund or exchange an order, or asks for its price; a fifth of
    the customers have two wishes. About a third of the wishes are forbidden by the rules, which are the
    system message. Held-out tasks (the set "") have other names, numbers and items than training; the set
    `combinations` has pairs of wishes that do not occur in training.

    Args:
        user: Options of a `ModelUser`, which plays the customers: `{url, model, api_key_env, timeout_s, …}`.
            None: the customers follow a script.
        seed: Determines all tasks.

    Raises:
        ConfigError: An option of `user` is invalid.
    """

    name: ClassVar[str] = "customer_service"
    rewards = (Reward("resolved", resolved),)

    def __init__(self, user: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        self._model = None if user is None else construct(ModelUser, user, "customer_service's user")
        self._seed = seed

    def train_task(self, index: int) -> Task:
        return self._task("train", index)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return self._held_out

    @cached_property
    def _held_out(self) -> dict[str, list[Task]]:
        parts: dict[str, ScenarioSet] = {"": "held_out", "combinations": "combinations"}
        return {
            name: [self._task(parts[name], index) for index in range(size)] for name, size in HELD_OUT.items()
        }

    def _task(self, part: ScenarioSet, index: int) -> Task:
        scenario = make_scenario(self._seed, part, index)
        messages = [
            {"role": "system", "content": RULES},
            {"role": "user", "content": opening(scenario)},
        ]
        place = {"seed": self._seed, "part": part, "index": index}
        return Task(f"{part}-{self._seed}-{index}", self.name, messages, info=place)

    async def setup(self, task: Task) -> ServiceEpisode:
        scenario = make_scenario(**task.info)
        first = {"role": "user", "content": opening(scenario)}
        return ServiceEpisode(scenario, copy.deepcopy(scenario.database), ScriptedUser(scenario), [first])

    async def respond(self, state: ServiceEpisode, reply: Message) -> str | Done:
        text = str(reply.get("content") or "")
        state.said.append({"role": "assistant", "content": text})
        if len(state.replies) >= MOST_REPLIES:
            return Done()
        if self._model is None:
            answer = state.user.answer(text)
        else:
            answer = await self._model.answer(state.scenario, state.said)
        if answer is None:
            state.over = not state.user.gave_up
            return Done()
        state.said.append({"role": "user", "content": answer})
        return answer

    @tool
    def find_customer(self, state: ServiceEpisode, name: str, zip: str) -> str:
        """Finds the number of a customer.

        Args:
            name: Name of the customer.
            zip: Zip code of the customer.
        """
        state.searched = True
        state.customer = number = state.database.find_customer(name, zip)
        if number is None:
            raise ToolError("no such customer")
        return f"customer {number}"

    @tool
    def find_order(self, state: ServiceEpisode, customer: str, order: str) -> str:
        """Looks up item, price and status of a customer's order.

        Args:
            customer: Number of the customer.
            order: Number of the order.
        """
        if customer == state.customer:
            state.looked.add(order)
        found = state.database.find_order(customer, order)
        if found is None:
            raise ToolError("no such order of this customer")
        return f"{found.item}, {found.price} euros, {found.status}"

    @tool
    def find_item(self, state: ServiceEpisode, item: str) -> str:
        """Tells whether an item is in stock.

        Args:
            item: Name of the item, such as "red lamp".
        """
        if item not in state.database.stock:
            raise ToolError("no such item")
        return "in stock" if state.database.stock[item] > 0 else "sold out"

    @tool
    def cancel_order(self, state: ServiceEpisode, order: str) -> str:
        """Cancels an order.

        Args:
            order: Number of the order.
        """
        self._begin_change(state, order)
        state.database.cancel(order)
        return "ok"

    @tool
    def readdress_order(self, state: ServiceEpisode, order: str, address: str) -> str:
        """Changes the address to which an order is sent.

        Args:
            order: Number of the order.
            address: The new address.
        """
        self._begin_change(state, order)
        state.database.readdress(order, address)
        return "ok"

    @tool
    def refund_order(self, state: ServiceEpisode, order: str) -> str:
        """Pays back the price of an order.

        Args:
            order: Number of the order.
        """
        self._begin_change(state, order)
        state.database.refund(order)
        return "ok"

    @tool
    def exchange_order(self, state: ServiceEpisode, order: str, item: str) -> str:
        """Exchanges an order for another item.

        Args:
            order: Number of the order.
            item: The new item.
        """
        self._begin_change(state, order)
        if item not in state.database.stock:
            raise ToolError("no such item")
        state.database.exchange(order, item)
        return "ok"

    @staticmethod
    def _begin_change(state: ServiceEpisode, order: str) -> None:
        if order not in state.database.orders:
            raise ToolError("no such order")
        state.blind = state.blind or order not in state.looked
