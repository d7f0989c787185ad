"""Short stories with two numbers, which the calculator adds, subtracts, multiplies or divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward, exact_answer
from tidegate.types import Task

TRAINING = {
    "+": (
        "A farm has {a} hens and buys {b} more. How many hens does it have now?",
        "Mia has {a} shells. Her brother gives her {b} shells. How many has she got?",
        "There are {a} red cars and {b} blue cars. How many cars are there?",
        "A book costs ${a} and a lamp costs ${b}. What do both cost together?",
        "Tom ran {a} meters before lunch and {b} meters after it. How far did he run in all?",
        "The library had {a} books. Then {b} new books came. What is the total?",
    ),
    "-": (
        "A shop had {a} cups and sold {b} of them. How many cups are left?",
        "Leo had {a} coins and lost {b}. How many coins does he still have?",
        "Of {a} guests, {b} went home. How many guests stayed?",
        "A rope is {a} meters long. {b} meters are cut off. How long is the rest?",
        "Nina has {a} stamps and Paul has {b}. How many more stamps does Nina have?",
        "There were {a} birds in a tree. {b} flew away. How many remained?",
    ),
    "*": (
        "There are {a} boxes with {b} pens in each. How many pens are there?",
        "A ticket costs ${a}. What do {b} tickets cost?",
        "A worker makes {a} parts an hour. How many parts does he make in {b} hours?",
        "Each of {a} bags holds {b} apples. How many apples do they hold?",
        "A hall has {a} rows of {b} seats. How many seats does it have?",
        "A bus drives {a} miles every day. How far does it drive in {b} days?",
    ),
    "/": (
        "{a} sweets are shared equally by {b} children. How many does each child get?",
        "{a} eggs are packed in {b} equal cartons. How many eggs are in each carton?",
        "A rope of {a} meters is cut into {b} equal pieces. How long is one piece?",
        "{a} players are split into {b} equal teams. How many players are in a team?",
        "A bill of ${a} is divided among {b} friends. How much does each friend pay?",
        "A runner covers {a} meters in {b} equal laps. How long is a lap?",
    ),
}
HELD_OUT = {
    "+": (
        "A pond had {a} fish. A man put in {b} more fish. How many fish are in it now?",
        "Rosa saved ${a} in May and ${b} in June. How much did she save in total?",
        "One crate has {a} pears and another has {b} pears. How many pears are there in all?",
    ),
    "-": (
        "Sam had {a} marbles and gave {b} to a friend. How many marbles are left?",
        "A tank held {a} liters. {b} liters leaked out. How many liters remained?",
        "A class has {a} pupils and {b} are ill today. How many pupils are not ill?",
    ),
    "*": (
        "A shelf holds {b} jars. How many jars do {a} shelves hold?",
        "A pack has {a} cards. How many cards are in {b} packs?",
        "Ben earns ${a} a day. How much does he earn in {b} days?",
    ),
    "/": (
        "{a} roses are put equally into {b} vases. How many roses are in each vase?",
        "{a} nuts are shared by {b} squirrels equally. How many nuts does each one get?",
        "${a} is split equally between {b} sisters. How much does each sister get?",
    ),
}
HELD_OUT_TASKS = 96


class Stories(Environment):
    """Endless stories; the held-out ones are of wordings that are not trained on."""

    name: ClassVar[str] = "stories"
    rewards = (Reward("exact_answer", exact_answer),)

    def train_task(self, index: int) -> Task:
        return draw("train", index, TRAINING)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [draw("held_out", index, HELD_OUT) for index in range(HELD_OUT_TASKS)]}


def draw(split: str, index: int, wordings: Mapping[str, Sequence[str]]) -> Task:
    rng = Random(f"{split}/{index}")
    sign = rng.choice(list(wordings))
    b, each = rng.randint(3, 40), rng.randint(13, 90)
    a = {"+": each, "-": b + each, "*": each, "/": b * each}[sign]
    value = {"+": a + b, "-": a - b, "*": a * b, "/": each}[sign]
    question = rng.choice(wordings[sign]).format(a=a, b=b)
    message = {"role": "user", "content": question}
    return Task(f"{split}-{index}", Stories.name, [message], f"#### {value}", {"kind": sign})
