"""The file of quarantined tasks."""

from __future__ import annotations

import json
from pathlib import Path

from tidegate.trainer.records.dead_letters import Attempted, DeadLetters
from tidegate.types import Outcome, Task


def test_a_dead_letter_has_the_messages_and_the_error_of_each_attempt(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "How many?"}]
    tried = [
        Attempted("g1.0.1", Outcome.AGENT_ERROR, "ValueError: no"),
        Attempted("g1.0.2", Outcome.TIMEOUT, None),
    ]
    letters = DeadLetters(tmp_path)
    assert not letters.path.exists(), "a run that gives nothing up has none"
    letters.write(Task("t1", "arithmetic", asked, answer="42"), "g1", 0, tried)
    letters.write(Task("t2", "arithmetic", asked), "g7", 3, tried[1:])
    first, second = (json.loads(line) for line in letters.path.read_text().splitlines())
    assert first.pop("time") > 0
    assert first == {
        "task": "t1", "env": "arithmetic", "messages": asked, "group": "g1", "slot": 0,
        "attempts": [
            {"attempt": "g1.0.1", "outcome": "agent_error", "why": "ValueError: no"},
            {"attempt": "g1.0.2", "outcome": "timeout", "why": None},
        ],
    }  # fmt: skip
    assert (second["task"], second["group"], second["slot"]) == ("t2", "g7", 3)


def test_a_task_that_cannot_be_serialised_has_a_dead_letter(tmp_path: Path) -> None:
    """Half of a surrogate pair, and a number of more than 64 bits."""
    letters = DeadLetters(tmp_path)
    asked = [{"role": "user", "content": "a \ud800 é", "number": 10**30}]
    letters.write(Task("t1", "mine", asked), "g1", 0, [Attempted("g1.0.1", Outcome.INFRA_ERROR, "\udcff")])
    [letter] = map(json.loads, letters.path.read_bytes().splitlines())
    assert letter["messages"] == [{"role": "user", "content": "a ? é", "number": 10**30}]


def test_a_torn_dead_letter_does_not_damage_the_next_one(tmp_path: Path) -> None:
    task = Task("t1", "arithmetic", [])
    DeadLetters(tmp_path).write(task, "g1", 0, [])
    path = DeadLetters(tmp_path).path
    path.write_bytes(path.read_bytes() + path.read_bytes()[:20])  # killed in the middle of a second one
    DeadLetters(tmp_path).write(task, "g2", 0, [])
    assert [json.loads(line)["group"] for line in path.read_text().splitlines()] == ["g1", "g2"]
