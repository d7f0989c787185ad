"""Seeded word problems in GSM8K's form: a question in prose, an answer that ends in `#### number`.

There are three disjoint sets: endless training problems; held-out problems of the same templates, which a
hash of the text excludes from training; and held-out problems of templates that are never trained on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import ClassVar

from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward, exact_answer
from tidegate.errors import ConfigError
from tidegate.types import Task

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ivy", "Jack", "Kate", "Leo",
         "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor")  # fmt: skip
THINGS = ("apples", "books", "buttons", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "oranges",
          "pears", "pens", "shells", "stamps", "stickers", "toys")  # fmt: skip

Numbers = dict[str, int]
HELD_OUT_SHARE = 16
"""One problem in 16 is held out."""


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of problem.

    `text` has placeholders for two names {N} {M}, two things {X} {Y} and the numbers; `expression` is the
    right expression over the numbers' letters; `draw` returns numbers for which every intermediate result
    is a positive integer.
    """

    name: str
    text: str
    expression: str
    draw: Callable[[Random], Numbers]


@dataclass(frozen=True, slots=True)
class Problem:
    template: Template
    question: str
    numbers: Numbers

    @property
    def expression(self) -> str:
        """The right expression in numbers: `(12 + 3) * 4`."""
        return substitute_numbers(self.template.expression, self.numbers)

    @property
    def answer(self) -> str:
        value = evaluate(self.template.expression, self.numbers)
        return f"{self.expression} = {value}\n#### {value}"

    @property
    def held_out(self) -> bool:
        digest = hashlib.blake2b(self.question.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def substitute_numbers(expression: str, numbers: Numbers) -> str:
    return re.sub(r"[a-z]", lambda letter: str(numbers[letter[0]]), expression)


def evaluate(expression: str, numbers: Numbers) -> Fraction:
    """Returns the exact value of a template's expression."""
    letters = {letter: Fraction(number) for letter, number in numbers.items()}
    value: Fraction = eval(expression, {"__builtins__": {}}, letters)
    return value


def _plain(**ranges: tuple[int, int]) -> Callable[[Random], Numbers]:
    """Independent numbers, each within its range (both ends included)."""
    return lambda rng: {letter: rng.randint(*ends) for letter, ends in ranges.items()}


def _share_sum(rng: Random) -> Numbers:
    """(a + b) / c without remainder."""
    c, each = rng.randint(2, 9), rng.randint(3, 20)
    a = rng.randint(2, c * each - 2)
    return {"a": a, "b": c * each - a, "c": c}


def _share_rest(rng: Random) -> Numbers:
    """(a - b) / c without remainder."""
    b, c, each = rng.randint(2, 40), rng.randint(2, 9), rng.randint(2, 20)
    return {"a": b + c * each, "b": b, "c": c}


def _repack(rng: Random) -> Numbers:
    """a * b / c without remainder."""
    a, c, more = rng.randint(2, 12), rng.randint(2, 9), rng.randint(1, 6)
    return {"a": a, "b": c * more, "c": c}


def _bounded_product(rng: Random) -> Numbers:
    """a - b * c, positive."""
    b, c = rng.randint(2, 12), rng.randint(2, 9)
    return {"a": b * c + rng.randint(1, 60), "b": b, "c": c}


def _discount(rng: Random) -> Numbers:
    """(a - b) * c, with a above b."""
    b, c = rng.randint(2, 15), rng.randint(2, 9)
    return {"a": b + rng.randint(3, 40), "b": b, "c": c}


TEMPLATES = (
    Template("give_away", "{N} has {a} {X} and finds {b} more. Then {N} gives {c} {X} to {M}. "
             "How many {X} does {N} have now?", "a + b - c",
             _plain(a=(20, 99), b=(2, 60), c=(2, 20))),
    Template("boxes_and_rest", "{N} fills {a} boxes with {b} {X} each and has {c} {X} left over. "
             "How many {X} did {N} start with?", "a * b + c",
             _plain(a=(2, 15), b=(3, 20), c=(1, 30))),
    Template("times_as_many", "{N} has {a} {X}. {M} has {b} times as many. "
             "How many {X} do they have together?", "a + a * b",
             _plain(a=(3, 60), b=(2, 9))),
    Template("share_sum", "{N} has {a} {X} and {b} {Y}, and shares all of them among {c} friends. "
             "How many does each friend get?", "(a + b) / c", _share_sum),
    Template("change", "{N} pays for {b} {X} at ${c} each with ${a}. "
             "How much money does {N} get back?", "a - b * c", _bounded_product),
    Template("free_seats", "A room has {a} rows of {b} seats. {c} seats are taken. "
             "How many seats are free?", "a * b - c",
             _plain(a=(4, 20), b=(6, 20), c=(2, 20))),
    Template("wages", "{N} earns ${a} an hour and works {b} hours a day. "
             "How much does {N} earn in {c} days?", "a * b * c",
             _plain(a=(8, 30), b=(2, 9), c=(2, 7))),
    Template("twice_a_day", "Each day {N} reads {a} pages in the morning and {b} at night. "
             "How many pages does {N} read in {c} days?", "(a + b) * c",
             _plain(a=(3, 40), b=(3, 40), c=(2, 9))),
    Template("rest_of_book", "A book has {a} pages. {N} has read {b} and now reads {c} pages a day. "
             "How many more days will it take?", "(a - b) / c", _share_rest),
    Template("repack", "{N} bakes {a} trays of {b} cookies and puts them in bags of {c}. "
             "How many bags does {N} need?", "a * b / c", _repack),
    Template("discount", "A ticket costs ${a}, but children pay ${b} less. "
             "How much do {c} children pay?", "(a - b) * c", _discount),
    Template("leak", "A tank holds {a} liters and loses {b} liters an hour. "
             "How many liters are in it after {c} hours?", "a - b * c", _bounded_product),
    Template("two_prices", "{N} buys {a} {X} at ${b} each and {c} {Y} at ${d} each. "
             "How much does {N} spend?", "a * b + c * d",
             _plain(a=(2, 12), b=(2, 15), c=(2, 12), d=(2, 15))),
    Template("savings", "{N} has ${a} and saves ${b} a week for {c} weeks. Then {N} spends ${d}. "
             "How much money is left?", "a + b * c - d",
             _plain(a=(20, 90), b=(3, 20), c=(2, 9), d=(2, 20))),
    Template("lost_and_given", "{N} had {a} {X} but lost {b}. Then {c} friends gave {N} {d} {X} each. "
             "How many {X} does {N} have?", "a - b + c * d",
             _plain(a=(20, 90), b=(2, 19), c=(2, 6), d=(2, 12))),
    Template("rest_in_boxes", "{N} picks {a} {X}, eats {b} and puts the rest in {c} boxes. "
             "How many {X} are in each box?", "(a - b) / c", _share_rest),
)  # fmt: skip

UNSEEN_TEMPLATES = (
    Template("bags_and_gift", "{N} fills {a} bags with {b} {X} each. Then {N} gives {c} {X} to {M}. "
             "How many {X} does {N} have left?", "a * b - c",
             _plain(a=(4, 20), b=(6, 20), c=(2, 20))),
    Template("pool_and_share", "{N} has {a} {X} and {M} has {b}. They put all of them in {c} boxes. "
             "How many {X} are in each box?", "(a + b) / c", _share_sum),
    Template("money_left", "{N} has ${a} and buys {b} {X} at ${c} each. "
             "How much money is left?", "a - b * c", _bounded_product),
    Template("two_savers", "{N} saves ${a} a week and {M} saves ${b} a week. "
             "How much do they have together after {c} weeks?", "(a + b) * c",
             _plain(a=(3, 40), b=(3, 40), c=(2, 9))),
    Template("eat_and_buy", "{N} has {a} {X}, eats {b} and buys {c} more. "
             "How many {X} does {N} have now?", "a - b + c",
             _plain(a=(25, 99), b=(2, 20), c=(2, 60))),
)  # fmt: skip


def draw_problem(rng: Random, templates: Sequence[Template] = TEMPLATES) -> Problem:
    template = rng.choice(templates)
    names, things = rng.sample(NAMES, 2), rng.sample(THINGS, 2)
    numbers = template.draw(rng)
    words = {"N": names[0], "M": names[1], "X": things[0], "Y": things[1]}
    return Problem(template, template.text.format(**words, **numbers), numbers)


class Arithmetic(Environment):
    """Word problems of two or three operations.

    Args:
        seed: Determines the problems of all splits.
        held_out: Size of each held-out set, 1 to 10,000.
    """

    name: ClassVar[str] = "arithmetic"
    rewards = (Reward("exact_answer", exact_answer),)

    def __init__(self, seed: int = 0, held_out: int = 500) -> None:
        if not 1 <= held_out <= 10_000:
            raise ConfigError(f"arithmetic: held_out = {held_out} is not between 1 and 10,000")
        self._seed = seed
        self._held_out = held_out
        self._eval_sets: dict[str, list[Task]] | None = None

    def train_task(self, index: int) -> Task:
        problem = next(problem for problem in self._draws("train", index) if not problem.held_out)
        return self._task(f"train-{index}", problem)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        """Returns "" with the training templates and "unseen_templates" with those never trained on."""
        if self._eval_sets is None:
            held_out = (problem for problem in self._draws("held_out") if problem.held_out)
            unseen = self._draws("unseen", templates=UNSEEN_TEMPLATES)
            self._eval_sets = {
                "": self._distinct("held_out", held_out),
                "unseen_templates": self._distinct("unseen", unseen),
            }
        return self._eval_sets

    def _draws(
        self, split: str, index: int = 0, templates: Sequence[Template] = TEMPLATES
    ) -> Iterator[Problem]:
        # `random` hashes text seeds, so the problems of neighbouring indices are unrelated.
        rng = Random(f"arithmetic/{self._seed}/{split}/{index}")
        while True:
            yield draw_problem(rng, templates)

    def _distinct(self, split: str, problems: Iterator[Problem]) -> list[Task]:
        distinct: dict[str, Problem] = {}
        while len(distinct) < self._held_out:
            problem = next(problems)
            distinct.setdefault(problem.question, problem)
        return [self._task(f"{split}-{index}", problem) for index, problem in enumerate(distinct.values())]

    def _task(self, id: str, problem: Problem) -> Task:
        return Task(
            id=id,
            env=self.name,
            messages=[{"role": "user", "content": problem.question}],
            answer=problem.answer,
            info={"template": problem.template.name},
        )
