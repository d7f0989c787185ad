"""The demos of agents with tools on a real language model: their splits, chats and retrieval."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests import REPO
from tidegate.config import load_settings
from tidegate.envs.base import load_environment

FOLDER = REPO / "examples/small_agents"
spec = spec_from_file_location("small_agents_demo", FOLDER / "demo.py")
assert spec is not None
assert spec.loader is not None
demo = module_from_spec(spec)
spec.loader.exec_module(demo)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_no_name_or_passage_of_a_held_out_question_is_in_training() -> None:
    train, held_out = rows("train.jsonl"), rows("held_out.jsonl")
    for key in ("answer", "question", "id"):
        assert not {str(row[key]) for row in train} & {str(row[key]) for row in held_out}
    passages = {row["id"]: row["text"] for row in rows("passages.jsonl")}
    assert all(row["answer"] in passages[row["id"]] for row in (*train, *held_out))


def test_held_out_stories_are_worded_in_other_ways_and_all_are_solvable() -> None:
    stories = load_environment(f"{FOLDER / 'stories.py'}:Stories", {})
    module = __import__(type(stories).__module__, fromlist=["TRAINING"])
    seen = {wording for wordings in module.TRAINING.values() for wording in wordings}
    assert not seen & {wording for wordings in module.HELD_OUT.values() for wording in wordings}
    for task in (*stories.eval_sets()[""], *map(stories.train_task, range(50))):
        first, second = (int(one) for one in demo.numbers_in(str(task.messages[-1]["content"])))
        sign = task.info["kind"]
        result = demo.calculate(f"{first} {sign} {second}")
        assert task.answer == f"#### {result}", task


@pytest.mark.parametrize("kind", ["search", "calculator"])
def test_warm_up_chats_have_a_call_its_result_and_an_answer_that_is_seldom_right(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passages = [row["text"] for row in rows("passages.jsonl")]

    async def find(options: object, query: str) -> str:
        return passages[len(query)]

    monkeypatch.setattr(demo, "_find", find)
    monkeypatch.chdir(REPO)
    chats = tmp_path / "chats.jsonl"
    settings = load_settings(FOLDER / f"{kind}.toml", [f"--sft.chats={json.dumps([str(chats)])}"])
    demo.write_chats(settings)
    written = [json.loads(line) for line in chats.read_text().splitlines()]
    assert len(written) == demo.CHATS
    right = 0
    environment = load_environment(settings.env.use, settings.env.options)
    for index, chat in enumerate(written):
        *_, call, result, answer = chat["messages"]
        assert call["tool_calls"][0]["function"]["name"] == chat["tools"][0]["function"]["name"]
        assert result["content"]
        task = environment.train_task(index)
        right += str(task.answer).split()[-1].strip("[]'\"") in answer["content"]
    assert right <= demo.CHATS / 2
