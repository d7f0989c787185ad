"""The main demo's tasks are split by words and wordings, and its warm-up shows the form of answers alone."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests import REPO
from tests.unit.test_docs import TARGETS
from tidegate.config import load_settings
from tidegate.envs.base import load_environment
from tidegate.errors import StartError

spec = spec_from_file_location("words_demo", REPO / "examples/words/demo.py")
assert spec is not None
assert spec.loader is not None
demo = module_from_spec(spec)
spec.loader.exec_module(demo)

WORDS = load_environment(str(REPO / "examples/words/env.py:Words"), {})


def parts(text: str) -> tuple[str, str]:
    """The word of a question, and its wording without the word and the three kinds."""
    word = re.findall('"(.+?)"', text)[0]
    kinds = "animal|food|country|color"
    return word, re.sub(kinds, "_", text.replace(word, "_", 1))


def test_words_and_wordings_that_are_held_out_do_not_occur_in_training() -> None:
    train = [parts(str(WORDS.train_task(index).messages[-1]["content"])) for index in range(3000)]
    words, wordings = {word for word, _ in train}, {wording for _, wording in train}
    sets = {
        name: [parts(str(task.messages[-1]["content"])) for task in tasks]
        for name, tasks in WORDS.eval_sets().items()
    }
    assert len(words) > 70
    for held_out in sets.values():
        assert not words & {word for word, _ in held_out}
    assert {wording for _, wording in sets[""]} == wordings
    assert not wordings & {wording for _, wording in sets["unseen_wordings"]}
    assert WORDS.train_task(7) == WORDS.train_task(7)


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("animal", 1),
        (" Animal.", 1),
        ("food", 0),
        ("An animal", 0),
        ("animal or food", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_the_reward_is_for_the_right_word_alone(output: str | None, reward: float) -> None:
    task = next(task for task in WORDS.eval_sets()[""] if task.answer == "animal")
    assert WORDS.score(task, None, output, []).reward == reward


def test_the_warm_up_shows_the_form_and_not_the_answers() -> None:
    (path,) = load_settings(demo.CONFIG, []).sft.chats
    chats = [json.loads(line)["messages"] for line in (REPO / path).read_text().splitlines()]
    tasks = [WORDS.train_task(index) for index in range(len(chats))]
    assert [chat[:-1] for chat in chats] == [list(task.messages) for task in tasks]
    assert all(chat[-1]["content"] in task.info["kinds"] for chat, task in zip(chats, tasks, strict=True))
    right = sum(chat[-1]["content"] == task.answer for chat, task in zip(chats, tasks, strict=True))
    assert right / len(chats) <= 0.5


def test_the_model_is_fetched_into_build_and_a_command_that_fails_is_named() -> None:
    settings = load_settings(demo.CONFIG, [])
    assert settings.model.path.parent == Path("build")
    assert "demo-tiny" in TARGETS
    with pytest.raises(StartError, match=r"this command failed: .*-c exit\(3\)"):
        demo.run([sys.executable, "-c", "exit(3)"])
