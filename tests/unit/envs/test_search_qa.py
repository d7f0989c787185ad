"""The search_qa environment: data sets' questions, rewards and their metrics."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.envs.base import load_environment
from tidegate.envs.search.questions import decipher
from tidegate.envs.search.search_qa import SearchQA
from tidegate.errors import ConfigError
from tidegate.types import Task

CANARY = "test data, not to be found as plain text. canary test:0000"


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def questions(tmp_path: Path) -> dict[str, str]:
    """The options of a data set of one question."""
    path = written(tmp_path / "one.jsonl", [{"question": "Who?", "answers": ["Obama", "Barack Obama"]}])
    return {"path": path, "eval_path": path}


def test_the_gold_output_is_right(questions: dict[str, str]) -> None:
    environment = SearchQA(**questions, min_matches=2)
    task = environment.train_task(0)
    assert environment.score(task, None, environment.gold_output(task), []).reward == 1.0
    assert environment.score(task, None, "<answer>Obama</answer>", []).reward == 0.0


def test_every_grade_is_a_metric_whichever_is_the_reward(questions: dict[str, str]) -> None:
    task = Task("t", "search_qa", [], ["Barack Obama"], {"gold": {"d1": "", "d2": ""}})
    seen = [{"role": "tool", "content": "[d1] Obama\nA president."}]
    said = "<answer>president Obama</answer>"
    scored = SearchQA(**questions, metric="f1").score(task, None, said, seen)
    assert scored.reward == 0.5
    assert scored.metrics == {
        "em": 0.0,
        "sub_em": 0.0,
        "f1": 0.5,
        "exact": 0.0,
        "unparseable": 0.0,
        "retrieval_recall": 0.5,
    }
    assert SearchQA(**questions, metric="em").score(task, None, said, seen).reward == 0.0
    nothing = SearchQA(**questions, metric="f1").score(task, None, "Obama", seen)
    assert (nothing.reward, nothing.metrics["unparseable"]) == (0.0, 1.0)


def test_form_counts_only_where_it_is_asked_for(questions: dict[str, str]) -> None:
    task = Task("t", "search_qa", [], ["Rome"])
    assert SearchQA(**questions).score(task, None, "<answer>Paris</answer>", []).reward == 0.0
    scored = SearchQA(**questions, format_weight=0.1).score(task, None, "<answer>Paris</answer>", [])
    assert (scored.reward, scored.parts) == (0.1, {"em": 0.0, "format": 1.0})


def test_questions_in_the_columns_of_hotpotqa_and_nq(tmp_path: Path) -> None:
    hotpot = {
        "_id": "5a8b",
        "question": "Were both of one nationality?",
        "answer": "yes",
        "supporting_facts": [["Scott Derrickson", 0], ["Ed Wood", 0], ["Ed Wood", 1]],
    }
    nq = {
        "id": "nq-1",
        "question": "who sang it",
        "golden_answers": ["Adele", "adele adkins"],
        "gold_ids": [17],
    }
    plain = {"question": "When?", "answers": [1969]}
    path = written(tmp_path / "q.jsonl", [hotpot, nq, plain])
    tasks = SearchQA(path=path, eval_path=path).eval_sets()[""]
    assert [task.id for task in tasks] == ["eval-5a8b", "eval-nq-1", "eval-3"]
    assert [task.answer for task in tasks] == [["yes"], ["Adele", "adele adkins"], ["1969"]]
    assert [set(task.info.get("gold", ())) for task in tasks] == [
        {"Scott Derrickson", "Ed Wood"},
        {"17"},
        set(),
    ]
    seen = [{"role": "tool", "content": "[88] Ed Wood\nA film of 1994."}]
    environment = SearchQA(path=path, eval_path=path)
    assert environment.score(tasks[0], None, "<answer>Yes.</answer>", seen).metrics["retrieval_recall"] == 0.5
    assert "retrieval_recall" not in environment.score(tasks[2], None, "<answer>1969</answer>", []).metrics


def enciphered(text: str) -> str:
    """The published way: XOR with sha256 of the canary, repeated, then base64."""
    data = text.encode()
    key = hashlib.sha256(CANARY.encode()).digest() * (len(data) // 32 + 1)
    return base64.b64encode(bytes(a ^ b for a, b in zip(data, key, strict=False))).decode()


def test_browsecomp_plus_is_deciphered_in_memory_and_stays_as_it_is_on_disk(tmp_path: Path) -> None:
    question = "Which of the two, both born before 1900, was later a judge? " * 3
    row = {
        "query_id": "769",
        "query": enciphered(question),
        "answer": enciphered("Étienne"),
        "gold_docs": [
            {"docid": enciphered("4412"), "text": enciphered("A long text."), "url": enciphered("u")}
        ],
        "negative_docs": [{"docid": "not even base64"}],
    }
    path = written(tmp_path / "b.jsonl", [row])
    before = Path(path).read_bytes()
    (task,) = SearchQA(path=path, eval_path=path, canary=CANARY).eval_sets()[""]
    assert task.id == "eval-769"
    assert task.messages[0]["content"] == question
    assert task.answer == ["Étienne"]
    assert task.info == {"gold": {"4412": ""}}
    assert Path(path).read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["b.jsonl"]
    with pytest.raises(ConfigError, match=r"b.jsonl, line 1: its texts are not BrowseComp's"):
        SearchQA(path=path, eval_path=path, canary="another")


def test_the_cipher_is_the_published_one() -> None:
    key = hashlib.sha256(b"canary").digest()
    cipher = bytes(a ^ b for a, b in zip(b"x" * 40, key + key, strict=False))
    assert decipher(base64.b64encode(cipher).decode(), "canary") == "x" * 40


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "x"}, "there is none of 'question', 'query'"),
        ({"question": "x"}, "there is none of 'golden_answers', 'answers', 'answer'"),
        ({"question": "x", "answer": []}, "'answer' contains no answer"),
        ({"question": " ", "answer": "x"}, "'question' is empty"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "q.jsonl", [{"question": "x", "answer": "y"}, row])
    with pytest.raises(ConfigError, match=f"line 2: {message}"):
        SearchQA(path=path, eval_path=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "emm"}, "no metric 'emm'; did you mean 'em'"),
        ({"metric": "judge"}, "must be set together"),
        ({"judge": {"url": "http://x", "model": "m"}}, "must be set together"),
        ({"eval_path": None}, "needs the option 'eval_path'"),
        (
            {"metric": "judge", "judge": {"url": "http://x", "modle": "m"}},
            "no option 'modle'; did you mean 'model'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], message: str, questions: dict[str, str]
) -> None:
    given = {name: value for name, value in (questions | options).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        load_environment("search_qa", given)
