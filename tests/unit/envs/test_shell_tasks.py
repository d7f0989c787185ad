"""Generated tasks on files: determinism, held-out names, one file per question."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest

from examples.bases.names import held_out_name
from examples.shell.env import Shell
from examples.shell.file_tasks import FIRST, KINDS, SECOND, draw_task
from tidegate.envs.shell.sandboxed import shown
from tidegate.errors import ConfigError
from tidegate.sandbox import CommandResult

NAME = re.compile(rf"(?:{'|'.join(FIRST)})(?:{'|'.join(SECOND)})(?![a-z])")


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_in_question_is_in_one_file(kind: Any) -> None:
    for seed in range(100):
        task = draw_task(Random(seed), "held_out", kind)
        files = [path for path, content in task.before.items() if task.names[0] in content]
        assert files == [task.target]
        assert task.before != task.after


def test_names_of_training_and_of_held_out_tasks_are_distinct() -> None:
    environment = Shell()
    train, held_out = (
        set(NAME.findall(str([(one.messages, one.info) for one in tasks])))
        for tasks in (map(environment.train_task, range(300)), environment.eval_sets()[""])
    )
    assert len(train) > 500
    assert not any(map(held_out_name, train))
    assert all(map(held_out_name, held_out))


def test_the_same_index_gives_the_same_task() -> None:
    one, other = Shell(), Shell()
    assert [one.train_task(index) for index in (0, 7)] == [other.train_task(index) for index in (0, 7)]
    assert one.eval_sets() == other.eval_sets()
    assert one.train_task(0) != Shell(seed=1).train_task(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 0}, "held_out = 0 must be at least 1"),
        ({"sandbox": "bubblewarp"}, "there is no sandbox backend 'bubblewarp'; did you mean 'bubblewrap'?"),
        ({"limits": {"memory": 5}}, "env.options.limits has no 'memory'; did you mean 'memory_mb'?"),
        ({"output_chars": 0}, "env.options.output_chars = 0 must be at least 1"),
        ({"image": "debian"}, "the sandbox backend 'bubblewrap' takes no image"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Shell(**options)
    assert message in str(error.value)


def test_how_a_command_ended_is_part_of_its_result() -> None:
    assert shown(CommandResult(0, "", "", 0.1), 100) == "(no output)"
    assert shown(CommandResult(0, "a\n\n", "", 0.1), 100) == "a"
    assert shown(CommandResult(2, "a\n", "b\n", 0.1), 100) == "a\nb\n[exit status 2]"
    assert shown(CommandResult(137, "", "", 0.1, timed_out=True), 100) == "[timeout]"
    killed = CommandResult(137, "", "", 0.1, limit="memory")
    assert shown(killed, 100) == "[killed: the limit of memory was exceeded]"
    text = shown(CommandResult(0, "x" * 300 + "y" * 300, "", 0.1), 100)
    assert text == f"{'x' * 50}\n[500 characters left out]\n{'y' * 50}"
