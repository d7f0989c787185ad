"""Scenarios of the customer-service environment: a database, a customer, and what the customer wishes.

A scenario is drawn from its seed. Held-out scenarios have other names, order numbers and items than those of
training, and the set `combinations` has pairs of wishes that do not occur in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from random import Random
from typing import Literal, NamedTuple, get_args

from examples.bases.names import all_names, held_out_name
from examples.service.database import Customer, Database, Order, Status

Kind = Literal["cancel", "readdress", "refund", "exchange", "price"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Reason = Literal["identity", "owner", "status", "stock"]
"""Why a wish is forbidden: the customer's identity is wrong, the order belongs to another customer, its
status does not allow the change, or the item is sold out."""
ScenarioSet = Literal["train", "held_out", "combinations"]

ALLOWED_STATUS: dict[Kind, Sequence[Status]] = {
    "cancel": ("pending",),
    "readdress": ("pending",),
    "refund": ("delivered",),
    "exchange": ("delivered",),
    "price": ("pending", "shipped", "delivered"),
}
"""Kind of wish → status of orders for which the rules allow it."""
OPEN_STATUS: tuple[Status, ...] = ("pending", "shipped", "delivered")
COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink", "yellow", "purple")
THINGS = ("lamp", "desk", "chair", "shelf", "sofa", "rug", "clock", "mirror", "vase", "table", "stool",
          "kettle", "toaster", "radio", "bench", "curtain")  # fmt: skip
CUSTOMERS, ORDERS = 6, 3
"""Customers of a database, and orders of each."""
FORBIDDEN_SHARE, PAIR_SHARE = 0.36, 0.2
INSIST_SHARE, NAMELESS_SHARE, INTRODUCED_SHARE = 0.5, 0.2, 0.25


@dataclass(frozen=True, slots=True)
class Wish:
    """One thing that a customer wants done to an order, or wants to know of it."""

    kind: Kind
    order: str
    target: str = ""
    """The new address or the new item."""
    forbidden: Reason | None = None
    """Why the rules forbid it; None: it is to be granted."""


@dataclass(frozen=True, slots=True)
class UserScenario:
    database: Database
    """The database at the start; it is not to be changed."""
    name: str
    zip_code: str
    """What the customer states as name and zip code."""
    wishes: tuple[Wish, ...]
    introduced: bool
    """Whether the first message has the customer's name and zip code."""
    nameless: bool
    """Whether the first message omits the order's number."""
    insists: bool
    """Whether the customer insists once when a wish is refused."""

    def final_database(self) -> Database:
        """Returns the database after the changes that the rules allow."""
        database = copy.deepcopy(self.database)
        for wish in self.wishes:
            if wish.forbidden is None:
                grant(wish, database)
        return database

    def facts(self) -> list[str]:
        """Returns what the customer is to be told: the prices that may be stated."""
        return [
            str(self.database.orders[wish.order].price)
            for wish in self.wishes
            if wish.kind == "price" and wish.forbidden is None
        ]


def grant(wish: Wish, database: Database) -> None:
    """Makes the change that a wish asks for."""
    changes: dict[Kind, Callable[[], None]] = {
        "cancel": lambda: database.cancel(wish.order),
        "refund": lambda: database.refund(wish.order),
        "readdress": lambda: database.readdress(wish.order, wish.target),
        "exchange": lambda: database.exchange(wish.order, wish.target),
        "price": lambda: None,
    }
    changes[wish.kind]()


class NamePool(NamedTuple):
    """Names, numbers and items of one half of the world: held out, or not."""

    names: list[str]
    numbers: list[str]
    items: list[str]


@cache
def pool(held_out: bool) -> NamePool:
    """Returns the names, numbers and items that are held out, or those that are not."""

    def part(names: Iterator[str]) -> list[str]:
        return [name for name in names if held_out_name(name) == held_out]

    return NamePool(
        part(iter(all_names())),
        part(str(number) for number in range(1000, 10_000)),
        part(f"{colour} {thing}" for colour, thing in product(COLOURS, THINGS)),
    )


def held_out_pair(first: Kind, second: Kind) -> bool:
    """Returns whether training has no customer with these two wishes in this order."""
    return (KINDS.index(first) + 2 * KINDS.index(second)) % 3 == 0


def make_scenario(seed: int | str, part: ScenarioSet, index: int) -> UserScenario:
    """Returns a scenario; the same arguments always give the same one.

    Args:
        seed: Seed of all scenarios.
        part: `train`, `held_out`, or `combinations` (held out, with a pair of wishes that training lacks).
        index: Number of the scenario.
    """
    rng = Random(f"customer_service/{seed}/{part}/{index}")
    words = pool(part != "train")
    database = _database(rng, words)
    number = rng.choice(list(database.customers))
    customer = database.customers[number]
    kinds = _kinds(rng, part)
    own = rng.sample([key for key, order in database.orders.items() if order.customer == number], len(kinds))
    wishes = [
        _wish(rng, kind, order, database, words, alone=len(kinds) == 1)
        for kind, order in zip(kinds, own, strict=True)
    ]
    zip_code = customer.zip_code
    if any(wish.forbidden == "identity" for wish in wishes):
        zip_code = rng.choice([one.zip_code for key, one in database.customers.items() if key != number])
    introduced = rng.random() < INTRODUCED_SHARE
    nameless, insists = rng.random() < NAMELESS_SHARE, rng.random() < INSIST_SHARE
    return UserScenario(database, customer.name, zip_code, tuple(wishes), introduced, nameless, insists)


def _kinds(rng: Random, part: ScenarioSet) -> tuple[Kind, ...]:
    if part == "combinations" or rng.random() < PAIR_SHARE:
        pairs = [pair for pair in product(KINDS, KINDS) if held_out_pair(*pair) == (part == "combinations")]
        return rng.choice(pairs)
    return (rng.choice(KINDS),)


def _database(rng: Random, words: NamePool) -> Database:
    count = CUSTOMERS * ORDERS
    names, items = rng.sample(words.names, CUSTOMERS), rng.sample(words.items, count + 8)
    numbers = iter(rng.sample(words.numbers, 2 * (CUSTOMERS + count)))
    zip_codes, keys = list(islice(numbers, CUSTOMERS)), list(islice(numbers, CUSTOMERS))
    orders, boxes = list(islice(numbers, count)), list(numbers)
    customers = {
        key: Customer(name, zip_code) for key, name, zip_code in zip(keys, names, zip_codes, strict=True)
    }
    return Database(
        customers,
        {
            order: Order(
                keys[n % CUSTOMERS],
                items[n],
                rng.randint(10, 99),
                f"box {boxes[n]}",
                rng.choice(OPEN_STATUS),
            )
            for n, order in enumerate(orders)
        },
        {item: rng.randint(1, 9) if n % 2 else 0 for n, item in enumerate(items)},
    )


def _wish(rng: Random, kind: Kind, order: str, database: Database, words: NamePool, *, alone: bool) -> Wish:
    """Draws a wish, and gives the order the status that allows or forbids it."""
    forbidden = rng.choice(_reasons(kind, alone)) if rng.random() < FORBIDDEN_SHARE else None
    customer = database.orders[order].customer
    if forbidden == "owner":
        order = rng.choice([key for key, one in database.orders.items() if one.customer != customer])
    wrong = [status for status in OPEN_STATUS if status not in ALLOWED_STATUS[kind]]
    database.orders[order].status = rng.choice(wrong if forbidden == "status" else ALLOWED_STATUS[kind])
    target = ""
    if kind == "readdress":
        target = f"box {rng.choice(words.numbers)}"
    elif kind == "exchange":
        in_stock = forbidden != "stock"
        item = database.orders[order].item
        target = rng.choice([
            key for key, number in database.stock.items() if (number > 0) == in_stock and key != item
        ])  # fmt: skip
    return Wish(kind, order, target, forbidden)


def _reasons(kind: Kind, alone: bool) -> list[Reason]:
    """Returns the reasons for which a wish may be forbidden, repeated by their weight."""
    reasons: list[Reason] = ["owner", "identity"] if alone else ["owner"]
    if kind != "price":
        reasons += ["status", "status"]
    if kind == "exchange":
        reasons += ["stock", "stock"]
    return reasons
