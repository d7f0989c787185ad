"""A seeded world to search in: people, companies, cities and mayors, one fact per passage.

Every fact leads from one entity to another, so a question of n hops is answered by a chain of n passages.
Worlds of different splits share no entity, so answers to held-out questions cannot be memorised in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from examples.bases.names import all_names, held_out_name

WorldSplit = Literal["train", "held_out"]

Relation = Literal["employer", "seat", "mayor"]
FACTS: dict[Relation, str] = {
    "employer": "{subject} works at {object}.",
    "seat": "{subject} is based in {object}.",
    "mayor": "{subject} is led by mayor {object}.",
}
"""Relation → its passage."""
QUERIES: dict[Relation, str] = {
    "employer": "{subject} works",
    "seat": "{subject} based",
    "mayor": "{subject} mayor",
}
"""Relation → a query that finds its passage."""
PEOPLE, COMPANIES, CITIES = 85, 85, 30


@dataclass(frozen=True, slots=True)
class Fact:
    """One passage: `subject` leads to `object`."""

    id: str
    relation: Relation
    subject: str
    object: str

    @property
    def text(self) -> str:
        return FACTS[self.relation].format(subject=self.subject, object=self.object)

    @property
    def query(self) -> str:
        return QUERIES[self.relation].format(subject=self.subject)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of question; `path` has the relations that lead from its entity to the answer."""

    name: str
    text: str
    path: tuple[Relation, ...]


KINDS = (
    Kind("company_of_person", "For which company does {} work?", ("employer",)),
    Kind("city_of_company", "In which city is {} based?", ("seat",)),
    Kind("mayor_of_city", "Who is the mayor of {}?", ("mayor",)),
    Kind("city_of_person", "In which city does {} work?", ("employer", "seat")),
    Kind("mayor_of_company", "Who is the mayor of the city where {} is based?", ("seat", "mayor")),
    Kind("mayor_of_person", "Who is the mayor of the city where {} works?", ("employer", "seat", "mayor")),
)


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    """A question with the chain of facts that answers it."""

    kind: Kind
    text: str
    facts: tuple[Fact, ...]

    @property
    def answer(self) -> str:
        return self.facts[-1].object

    @property
    def hops(self) -> int:
        return len(self.facts)


@dataclass(frozen=True, slots=True)
class SyntheticWorld:
    facts: tuple[Fact, ...]

    def questions(self, hops: int) -> Iterator[WorldQuestion]:
        """Yields all questions with this number of hops, in the facts' order."""
        by_subject = {fact.subject: fact for fact in self.facts}
        for start in self.facts:
            for kind in KINDS:
                if len(kind.path) == hops and kind.path[0] == start.relation:
                    yield WorldQuestion(
                        kind, kind.text.format(start.subject), _follow(start, hops, by_subject)
                    )

    def entities(self) -> set[str]:
        return {name for fact in self.facts for name in (fact.subject, fact.object)}


def make_world(seed: int | str, split: WorldSplit) -> SyntheticWorld:
    """Returns the seed's world: 85 people, 85 companies, 30 cities with a mayor each, and 200 facts."""
    rng = Random(f"world/{seed}/{split}")
    names = [name for name in all_names() if held_out_name(name) == (split == "held_out")]
    drawn = iter(rng.sample(names, PEOPLE + COMPANIES + 2 * CITIES))
    people, companies, cities, mayors = (
        [next(drawn) for _ in range(size)] for size in (PEOPLE, COMPANIES, CITIES, CITIES)
    )
    facts: list[tuple[Relation, str, str]] = [
        *(("employer", person, rng.choice(companies)) for person in people),
        *(("seat", company, rng.choice(cities)) for company in companies),
        *(("mayor", city, mayor) for city, mayor in zip(cities, mayors, strict=True)),
    ]
    return SyntheticWorld(tuple(Fact(f"{split}-{n}", *fact) for n, fact in enumerate(facts)))


def documents(worlds: Sequence[SyntheticWorld]) -> list[dict[str, str]]:
    """Returns the passages of worlds in a corpus's format: `id`, `title` (the subject) and `text`."""
    return [
        {"id": fact.id, "title": fact.subject, "text": fact.text} for world in worlds for fact in world.facts
    ]


def _follow(start: Fact, hops: int, by_subject: dict[str, Fact]) -> tuple[Fact, ...]:
    facts = [start]
    while len(facts) < hops:
        facts.append(by_subject[facts[-1].object])
    return tuple(facts)
