"""The shop's database: customers, their orders, and the stock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pending", "shipped", "delivered", "cancelled", "refunded"]


@dataclass(slots=True)
class Customer:
    name: str
    zip_code: str


@dataclass(slots=True)
class Order:
    customer: str
    """Number of the customer."""
    item: str
    price: int
    address: str
    status: Status


@dataclass(slots=True)
class Database:
    """Two databases are equal if their entries are, in any order.

    The changes do not check the rules: that is the agent's task. They raise KeyError for unknown entries.
    """

    customers: dict[str, Customer]
    """Number → customer."""
    orders: dict[str, Order]
    """Number → order."""
    stock: dict[str, int]
    """Item → number in stock."""

    def find_customer(self, name: str, zip_code: str) -> str | None:
        """Returns the number of the customer with this name and zip code; None if there is none."""
        matches = (
            number for number, one in self.customers.items() if (one.name, one.zip_code) == (name, zip_code)
        )
        return next(matches, None)

    def find_order(self, customer: str, order: str) -> Order | None:
        """Returns an order of a customer; None if that customer has no such order."""
        found = self.orders.get(order)
        return found if found is not None and found.customer == customer else None

    def cancel(self, order: str) -> None:
        self.orders[order].status = "cancelled"

    def refund(self, order: str) -> None:
        self.orders[order].status = "refunded"

    def readdress(self, order: str, address: str) -> None:
        self.orders[order].address = address

    def exchange(self, order: str, item: str) -> None:
        self.stock[item] -= 1
        self.orders[order].item = item
