"""The environment `dataset`: files, prompts, the held-out part, rewards by name, and invalid rows."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tidegate.envs.base import load_environment
from tidegate.envs.datasets.dataset import Dataset
from tidegate.envs.datasets.rows import read_rows
from tidegate.errors import ConfigError

ROWS = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n, "level": n % 3} for n in range(40)]


def jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return jsonl(tmp_path / "sums.jsonl", ROWS)


def ids(environment: Dataset, count: int) -> list[str]:
    return [environment.train_task(index).id for index in range(count)]


def test_rows_become_tasks_by_settings_alone(data: str) -> None:
    environment = load_environment("dataset", {"path": data, "rewards": ["numeric"], "system": "Be brief."})
    task = environment.train_task(0)
    number = int(task.id.removeprefix("row-")) - 1
    assert task.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {number} + {number}?"},
    ]
    assert (task.env, task.answer) == ("dataset", 2 * number)
    assert task.info == {"prompt": f"What is {number} + {number}?", "level": number % 3}
    assert environment.score(task, None, f"#### {2 * number}", []).reward == 1.0
    assert environment.gold_output(task) == str(2 * number)


def test_a_prompt_may_be_a_text_with_columns(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", [{"q": f"q{n}", "hint": n, "a": "x"} for n in range(5)])
    environment = Dataset(data, prompt="{q} (hint: {hint})\n{{JSON}}", answer="a")
    contents = {environment.train_task(n).messages[0]["content"] for n in range(4)}
    assert contents < {f"q{n} (hint: {n})\n{{JSON}}" for n in range(5)}


def test_toml_can_say_that_there_are_no_answers(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", [{"prompt": str(n)} for n in range(2)])
    options = tomllib.loads('answer = ""\nrewards = ["contains"]')
    environment = Dataset(data, **options)
    assert environment.train_task(0).answer is None
    bad = jsonl(tmp_path / "e.jsonl", [{"prompt": "1", "answer": ""}])
    with pytest.raises(ConfigError, match='set answer = ""'):
        Dataset(bad)


def test_a_prompt_may_be_messages(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    data = jsonl(
        tmp_path / "d.jsonl", [{"prompt": [*talk, {"role": "user", "content": str(n)}]} for n in (1, 2)]
    )
    environment = Dataset(data, answer=None, rewards=["contains"])
    assert environment.train_task(0).messages[:2] == talk
    assert environment.train_task(0).answer is None
    assert environment.gold_output(environment.train_task(0)) is None


def test_the_held_out_part_is_by_content(tmp_path: Path, data: str) -> None:
    """Twice the same prompt is never in both parts, and order and company don't move a row."""
    doubled = jsonl(tmp_path / "doubled.jsonl", [*reversed(ROWS), *ROWS])
    held = {task.messages[0]["content"] for task in Dataset(data).eval_sets()[""]}
    environment = Dataset(doubled)
    assert {task.messages[0]["content"] for task in environment.eval_sets()[""]} == held
    assert len(held) == 4
    size = environment.train_size()
    assert size == 72
    assert not held & {environment.train_task(n).messages[0]["content"] for n in range(size)}
    assert len(Dataset(data, eval_fraction=0.5).eval_sets()[""]) == 20


def test_held_out_may_be_another_file(tmp_path: Path, data: str) -> None:
    other = jsonl(tmp_path / "held.jsonl", [{"prompt": "Held?", "answer": "yes"}])
    environment = Dataset(data, eval_path=other)
    assert [task.id for task in environment.eval_sets()[""]] == ["eval-1"]
    assert environment.train_size() == len(ROWS)


def test_every_epoch_has_each_row_once(data: str) -> None:
    environment = Dataset(data, seed=1)
    size = environment.train_size()
    assert sorted(ids(environment, size)) == sorted(ids(environment, 2 * size)[size:])
    assert ids(environment, size) != ids(environment, 2 * size)[size:]
    assert ids(environment, size) == ids(Dataset(data, seed=1), size) != ids(Dataset(data, seed=2), size)


def test_rewards_by_name_with_weights(tmp_path: Path, data: str) -> None:
    file = tmp_path / "own_rewards.py"
    file.write_text("def brief(output, info):\n    return 1.0 if len(output) < 10 + info['level'] else 0.0\n")
    rewards = [
        "numeric",
        {"use": f"{file}:brief", "weight": 0.25},
        {"use": "contains", "weight": 0.5, "name": "says_it"},
    ]
    environment = load_environment("dataset", {"path": data, "rewards": rewards})
    task = environment.train_task(0)
    scored = environment.score(task, None, f"#### {task.answer}", [])
    assert scored.parts == {"numeric": 1.0, "brief": 1.0, "says_it": 1.0}
    assert scored.reward == 1.75
    assert scored.metrics["extractor/hash"] == 1.0
    assert environment.score(task, None, "no idea whatsoever", []).reward == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": ["numerik"]}, "no reward 'numerik'; did you mean 'numeric'"),
        ({"rewards": []}, "rewards must list names"),
        ({"rewards": [{"use": "numeric", "wieght": 2}]}, "no setting 'wieght'; did you mean 'weight'"),
        ({"rewards": [{"weight": 2}]}, "needs a 'use'"),
        ({"rewards": [{"use": "numeric", "weight": "2"}]}, "weight '2', which is not a number"),
        ({"rewards": ["numeric", "numeric"]}, "two rewards have the same name"),
        ({"eval_fraction": 1.5}, "eval_fraction = 1.5 is not between 0 and 1"),
        ({"eval_fraction": 0.5, "eval_path": "x.jsonl"}, "exclude each other"),
        ({"eval_path": "nowhere.jsonl"}, "nowhere.jsonl: there is no such data file"),
        ({"path": "."}, "is a directory"),
        ({"prompt": "{prompt"}, "double each literal brace"),
        ({"prompt": "{prompt.__class__}"}, "braces must contain a column's name"),
        ({"pth": "x"}, "no option 'pth'"),
    ],
)
def test_an_invalid_option_is_refused(data: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_environment("dataset", {"path": data, **options})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"promt": "x", "answer": 1}', "line 3: there is no key 'prompt'; did you mean 'promt'"),
        ('{"prompt": "x"}', "line 3: there is no key 'answer'"),
        ('{"prompt": "x", "answer": null}', "line 3: 'answer' is empty"),
        ('{"prompt": "", "answer": 1}', "line 3: 'prompt' is empty"),
        ('{"prompt": 7, "answer": 1}', "line 3: 'prompt' is 7, not a text"),
        ('{"prompt": [{"content": "x"}], "answer": 1}', "line 3: 'prompt' is a list, but not of messages"),
        ('{"prompt": [], "answer": 1}', "line 3: 'prompt' contains no message"),
        ('["x", 1]', "line 3: a list; write one object a line, as jq -c '.[]' "),
        ("4", "line 3: 4, not an object"),
        ('{"prompt": "x", "answer": NaN}', "line 3: not valid JSON: NaN"),
        ('{"prompt": "x"', "line 3: not valid JSON"),
        (
            '{"prompt": "x", "answer": 1, "answer": 2}',
            "line 3: not valid JSON: the key 'answer' occurs twice",
        ),
        (b'{"prompt": "\xff", "answer": 1}', "line 3: not UTF-8"),
        ('{"prompt": "x", "answer": " "}', "line 3: 'answer' is empty"),
        ('{"prompt": "x", "answer": ["y", ""]}', "line 3: 'answer' is empty"),
        ('{"prompt": "x", "answer": 1e400}', "line 3: not valid JSON: 1e400 is too large"),
        ('{"prompt": "x \\uD800", "answer": 1}', r'line 3: not valid JSON: "\ud800" is a lone surrogate'),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    good = b'{"prompt": "a", "answer": 1}\n\n'  # an empty line is none of the rows, but it is a line
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}, {message}")):
        Dataset(str(path))


def test_a_file_may_have_a_mark_at_its_start_and_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes("\ufeff".encode() + "".join(json.dumps(row) + "\r\n\r\n" for row in ROWS).encode())
    environment = Dataset(str(path))
    assert environment.train_size() == 36
    assert {task.answer for task in environment.eval_sets()[""]} < {row["answer"] for row in ROWS}


def test_whole_numbers_of_any_size_stay_numbers(tmp_path: Path) -> None:
    numbers = [2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30]
    rows = [{"prompt": f"{n}?", "answer": n, "\ud83d\ude00": 1} for n in numbers]
    path = jsonl(tmp_path / "big.jsonl", rows)
    tasks = Dataset(path, eval_path=path, rewards=["numeric"]).eval_sets()[""]
    assert [task.answer for task in tasks] == numbers


def test_a_file_without_rows_or_with_one_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no rows"):
        Dataset(jsonl(tmp_path / "none.jsonl", []))
    with pytest.raises(ConfigError, match="a single prompt cannot be split"):
        Dataset(jsonl(tmp_path / "one.jsonl", ROWS[:1] * 3))


def test_parquet_is_read_like_jsonl(tmp_path: Path, data: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "sums.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    left, right = Dataset(data), Dataset(str(path))
    assert [left.train_task(n) for n in range(36)] == [right.train_task(n) for n in range(36)]
    with pytest.raises(ConfigError, match=r"sums\.parquet, row 1: there is no key 'question'"):
        Dataset(str(path), prompt="question")
    path.write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"sums\.parquet cannot be read as parquet"):
        Dataset(str(path))


def test_parquets_dates_and_decimals_become_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from datetime import date
    from decimal import Decimal

    from pyarrow import parquet

    path = tmp_path / "d.parquet"
    rows = [
        {"prompt": f"p{n}", "answer": Decimal("1.50"), "day": date(2024, 1, 2), "x": [float("nan"), 1.0]}
        for n in range(2)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = Dataset(str(path)).train_task(0)
    assert task.answer == "1.50"
    assert task.info["day"] == "2024-01-02"
    assert task.info["x"] == [None, 1.0]


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "d.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"install Tidegate's extra 'data'"):
        Dataset(str(tmp_path / "d.parquet"))


def test_the_answer_may_be_the_last_message(tmp_path: Path) -> None:
    ask, reply = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
    rows = [{"chat": [{"role": "system", "content": str(n)}, ask, reply]} for n in range(3)]
    task = Dataset(jsonl(tmp_path / "d.jsonl", rows), prompt="chat", answer="chat").train_task(0)
    assert ([message["role"] for message in task.messages], task.answer) == (["system", "user"], "Yes?")
    assert task.info == {}
    for wrong in ([ask], [], "Hi", [{"role": "assistant", "content": None}], [reply]):
        path = jsonl(tmp_path / "e.jsonl", [*rows, {"chat": wrong}])
        with pytest.raises(ConfigError, match=r"e\.jsonl, line 4: "):
            Dataset(path, prompt="chat", answer="chat")


def test_invalid_rows_are_skipped_if_that_is_set(tmp_path: Path) -> None:
    bad = [{"prompt": "p"}, {"prompt": "p", "answer": " "}, {"prompt": 3, "answer": 1}]
    path = jsonl(tmp_path / "d.jsonl", [*ROWS, *bad])
    with pytest.raises(ConfigError, match="line 41: there is no key 'answer'"):
        Dataset(path)
    environment = Dataset(path, skip_invalid=True)
    assert environment.train_size() == Dataset(jsonl(tmp_path / "e.jsonl", ROWS)).train_size()
    assert [re.findall(r"line \d+", line) for line in environment.skipped] == [
        ["line 41"],
        ["line 42"],
        ["line 43"],
    ]
    with pytest.raises(ConfigError, match=r"no row can be used; the first one: .*line 1: there is no key"):
        Dataset(jsonl(tmp_path / "f.jsonl", bad), skip_invalid=True)


def test_the_gold_output_of_mathematics_is_boxed(data: str) -> None:
    pytest.importorskip("math_verify")
    environment = Dataset(data, rewards=["math_verify"])
    task = environment.train_task(0)
    assert environment.gold_output(task) == f"\\boxed{{{task.answer}}}"


def test_a_long_text_of_csv_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(f"q,a\n{'x' * 200_000},1\n")
    assert len(read_rows(tmp_path / "d.csv")[0].values["q"]) == 200_000


def test_separators_in_a_quoted_header_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('"task; in\n words; or ""so""",answer\n1 + 1?,2\n')
    assert [row.values for row in read_rows(tmp_path / "d.csv")] == [
        {'task; in\n words; or "so"': "1 + 1?", "answer": "2"}
    ]


@pytest.mark.parametrize(("separator", "mark"), [(",", b""), (";", b"\xef\xbb\xbf"), ("\t", b"")])
def test_csv_rows_are_texts(tmp_path: Path, separator: str, mark: bytes) -> None:
    lines = [
        ["question", "answer"],
        ['"He said ""a,b;c"".\nWhy?"', "12"],
        ["große Katze?", '"1,5"'],
        ["q3", "x"],
    ]
    text = "\r\n".join(separator.join(line) for line in lines) + "\r\n\r\n"
    (tmp_path / "d.csv").write_bytes(mark + text.encode())
    values = [row.values for row in read_rows(tmp_path / "d.csv")]
    assert values == [
        {"question": 'He said "a,b;c".\nWhy?', "answer": "12"},
        {"question": "große Katze?", "answer": "1,5"},
        {"question": "q3", "answer": "x"},
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"q,a\n1,2\n3\n", r"row 2: it does not have the 2 cells of the header"),
        (b"q,a\n1,2,3\n", r"row 1: it does not have the 2 cells of the header; .*\(','\) in quotes"),
        (b"q,a,q\n1,2,3\n", "the header has 'q' twice"),
        (b"q,a\n\xfc,1\n", r"not UTF-8: byte 0xfc \(invalid start byte\); save it as UTF-8"),
        (b'q,a\n1,2\n"x"y,1\n', "cannot be read as CSV: line 3: "),
        (b"", "contains no rows"),
        (b"q,a\n", "contains no rows"),
    ],
)
def test_csv_that_would_lose_values_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_rows(tmp_path / "d.csv")
