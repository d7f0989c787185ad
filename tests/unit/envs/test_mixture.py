"""Mixtures of environments: shares, order, names, and rewards by the environment of each task."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.local_rewards import LocalRewards
from tidegate.envs.arithmetic import TEMPLATES
from tidegate.envs.base import load_environment
from tidegate.envs.mixture import CYCLE, Mixture
from tidegate.errors import ConfigError
from tidegate.gateway.groups.rewards import Scorer
from tidegate.trainer.records.recorder import custom_metrics
from tidegate.types import Outcome, Trajectory


@pytest.fixture
def parts(tmp_path: Path) -> list[dict[str, Any]]:
    for name, size in (("facts", 60), ("sums", 30)):
        rows = [{"prompt": f"{name} {n}?", "answer": f"{name} {n}"} for n in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        {"use": "arithmetic", "options": {"held_out": 6}, "weight": 3},
        {
            "use": "dataset",
            "options": {"path": str(tmp_path / "facts.jsonl")},
            "weight": 1.5,
            "name": "facts",
        },
        {
            "use": "dataset",
            "options": {"path": str(tmp_path / "sums.jsonl"), "rewards": ["numeric"]},
            "weight": 0.5,
            "name": "sums",
        },
    ]


def test_shares_come_out_by_weight(parts: list[dict[str, Any]]) -> None:
    environment = load_environment("mixture", {"parts": parts})
    tasks = [environment.train_task(index) for index in range(2 * CYCLE)]
    assert Counter(task.env for task in tasks) == {"arithmetic": 1200, "facts": 600, "sums": 200}
    assert all(task.id.startswith(f"{task.env}/") for task in tasks)
    kinds = {task.kind for task in tasks}
    assert {"facts", "sums"} < kinds, "a part whose tasks name no kind is one kind"
    assert sum(kind.startswith("arithmetic/") for kind in kinds) == len(TEMPLATES)
    beginning = Counter(task.env for task in tasks[:100])
    assert all(beginning[name] > 0 for name in ("arithmetic", "facts", "sums")), "not one part after another"


def test_an_index_always_gives_the_same_task(parts: list[dict[str, Any]]) -> None:
    first, again, other = Mixture(parts, seed=1), Mixture(parts, seed=1), Mixture(parts, seed=2)
    far = [5000, 3, 999, 1000, 0]
    assert [first.train_task(n) for n in far] == [again.train_task(n) for n in reversed(far)][::-1]
    assert [first.train_task(n).id for n in range(20)] != [other.train_task(n).id for n in range(20)]


def test_each_part_is_gone_through_without_gaps(parts: list[dict[str, Any]]) -> None:
    """Whatever the others are: the mixture's facts, in order, are the facts' own first tasks."""
    environment = Mixture(parts)
    facts = environment.parts[1].environment
    drawn = [task for n in range(2 * CYCLE) if (task := environment.train_task(n)).env == "facts"]
    assert [task.id for task in drawn] == [f"facts/{facts.train_task(n).id}" for n in range(600)]


def test_held_out_sets_are_named_after_their_part(parts: list[dict[str, Any]]) -> None:
    sets = Mixture(parts).eval_sets()
    assert list(sets) == ["", "arithmetic", "arithmetic_unseen_templates", "facts", "sums"]
    assert {name: {task.env for task in tasks} for name, tasks in sets.items() if name == "facts"} == {
        "facts": {"facts"}
    }
    main = [task.id for task in sets[""]]
    assert len(main) == len(set(main)) == 6 + 6 + 3
    assert set(main) == {task.id for name in ("arithmetic", "facts", "sums") for task in sets[name]}


async def test_each_part_rewards_its_own_tasks(parts: list[dict[str, Any]]) -> None:
    environment = Mixture(parts)
    scorer = Scorer(LocalRewards(environment.rewarders()))
    sets = environment.eval_sets()
    expected = {"arithmetic": "exact_answer", "facts": "exact_match", "sums": "numeric"}
    for name, part in expected.items():
        task = sets[name][0]
        gold = environment.gold_output(task)
        one = Trajectory("s", task.id, task.env, "train", Outcome.COMPLETED, [], output=gold)
        one.metrics = {"turns": 2.0}
        await scorer.reward(one, task, {}, None)
        assert (one.reward, one.reward_parts) == (1.0, {part: 1.0})
        assert one.metrics["turns"] == 2.0
        assert ("unparseable" in one.metrics) == (name == "sums"), (
            "what a reward tells joins what the agent told"
        )
        assert environment.score(task, None, gold, []).parts == {part: 1.0}
        assert environment.score(task, None, "something else", []).reward == 0.0


def test_a_runs_metrics_are_reported_per_part() -> None:
    def episode(env: str, reward: float | None, **metrics: float) -> Trajectory:
        return Trajectory("s", "t", env, "train", Outcome.COMPLETED, [], reward=reward, metrics=metrics)

    mixed = [
        episode("sums", 1.0, unparseable=0.0),
        episode("sums", 0.0, unparseable=1.0),
        episode("facts", 1.0, turns=3.0),
    ]
    assert custom_metrics(mixed) == {
        "reward/sums": 0.5, "reward/facts": 1.0, "episode/unparseable": 0.5, "episode/turns": 3.0,
    }  # fmt: skip
    assert custom_metrics(mixed[:2]) == {"episode/unparseable": 0.5}, (
        "one environment is `reward/mean` already"
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts must be a list of tables"),
        ([{"weight": 1}], "part 1 needs a 'use'"),
        ([{"use": "arithmetic"}, {"use": "arithmetic", "wieght": 2}], "part 2 has no setting 'wieght'"),
        ([{"use": "arithmetic", "weight": 0}], "part 1 has the weight 0"),
        ([{"use": "arithmetic", "weight": float("nan")}], "part 1 has the weight nan"),
        ([{"use": "arithmetic"}, {"use": "arithmetic"}], "two parts are named 'arithmetic'"),
        ([{"use": "arithmetics"}], "did you mean 'arithmetic'"),
        ([{"use": "mixture", "options": {"parts": [{"use": "arithmetic"}]}}], "a part cannot be a mixture"),
    ],
)
def test_an_invalid_setting_is_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_environment("mixture", {"parts": parts})


def test_a_small_weight_is_still_seen_and_shares_always_add_up() -> None:
    def counts(*weights: float) -> list[int]:
        parts = [{"use": "arithmetic", "name": f"p{n}", "weight": w} for n, w in enumerate(weights)]
        return [part.share for part in Mixture(parts).parts]

    assert counts(1, 1, 1) == [334, 333, 333]
    assert counts(1e9, 1) == [999, 1]
    assert sum(counts(*[1.0] * 300)) == CYCLE
    assert min(counts(1e9, *[1.0] * 300)) == 1
