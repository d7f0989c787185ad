"""The synthetic world: one fact per passage, no entity in two splits, one answer per question."""

from __future__ import annotations

from collections import Counter

import pytest

from examples.bases.names import held_out_name
from examples.demo_search.env import WorldQuestions
from examples.demo_search.synthetic_world import KINDS, documents, make_world
from tidegate.errors import ConfigError


def test_a_world_is_two_hundred_facts_and_the_same_for_the_same_seed() -> None:
    world = make_world(0, "train")
    assert Counter(fact.relation for fact in world.facts) == {"employer": 85, "seat": 85, "mayor": 30}
    assert world == make_world(0, "train")
    assert world != make_world(1, "train")


@pytest.mark.parametrize("seed", range(3))
def test_worlds_of_the_two_splits_share_no_entity_whatever_their_seeds(seed: int) -> None:
    train = make_world(seed, "train").entities()
    for other in range(3):
        assert not train & make_world(other, "held_out").entities()
    assert not any(map(held_out_name, train))


def test_no_name_stands_for_two_things() -> None:
    world = make_world(0, "train")
    subjects = [fact.subject for fact in world.facts]
    assert len(set(subjects)) == len(subjects)
    assert len(world.entities()) == 85 + 85 + 30 + 30


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_question_is_answered_by_its_facts_in_a_row(hops: int) -> None:
    world = make_world(0, "held_out")
    questions = list(world.questions(hops))
    assert {question.kind for question in questions} == {kind for kind in KINDS if len(kind.path) == hops}
    assert len({question.text for question in questions}) == len(questions)
    for question in questions:
        assert question.hops == hops
        assert question.facts[0].subject in question.text
        assert question.answer not in question.text
        assert [fact.relation for fact in question.facts] == list(question.kind.path)
        for before, after in zip(question.facts, question.facts[1:], strict=False):
            assert before.object == after.subject


def test_a_passage_holds_one_fact_and_its_id_is_stable() -> None:
    world = make_world(0, "train")
    corpus = documents([world, make_world(0, "held_out")])
    assert len({one["id"] for one in corpus}) == len(corpus) == 400
    names = world.entities()
    for fact, document in zip(world.facts, corpus, strict=False):
        assert document == {"id": fact.id, "title": fact.subject, "text": fact.text}
        assert {word for word in fact.text.rstrip(".").split() if word in names} == {
            fact.subject,
            fact.object,
        }


def test_a_world_is_asked_by_hops_and_held_out_by_entity() -> None:
    environment = WorldQuestions()
    sets = environment.eval_sets()
    assert {name: len(tasks) for name, tasks in sets.items()} == {"": 170, "three_hops": 85}
    train = [environment.train_task(index) for index in range(environment.train_size() or 0)]
    assert {len(task.info["gold"]) for task in [*train, *sets[""]]} == {2}
    names = {word for task in train for text in task.info["gold"].values() for word in text.split()}
    assert all(task.answer[0] not in names for tasks in sets.values() for task in tasks)
    assert len({task.id for task in [*train, *sets[""], *sets["three_hops"]]}) == 170 + 170 + 85
    assert [environment.train_task(index) for index in range(170)] == train


def test_hops_and_seed_are_options() -> None:
    assert WorldQuestions(hops=3).train_size() == 85
    assert WorldQuestions(seed=1).train_task(0) != WorldQuestions(seed=0).train_task(0)
    with pytest.raises(ConfigError, match="questions of 1 to 3"):
        WorldQuestions(hops=4)


def test_the_gold_output_of_every_task_is_right() -> None:
    environment = WorldQuestions()
    for tasks in environment.eval_sets().values():
        for task in tasks:
            assert environment.score(task, None, environment.gold_output(task), []).reward == 1.0
            assert environment.score(task, None, task.answer[0], []).reward == 0.0
