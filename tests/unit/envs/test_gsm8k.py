"""GSM8K: its files, its gold answers, and verl's two graders against a plain reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from tests.gsm8k_data import GSM8K as DATA
from tests.gsm8k_data import needs_gsm8k
from tidegate.envs.base import Environment, load_environment
from tidegate.envs.datasets.gsm8k import GSM8K
from tidegate.envs.grading import math_verify as verifier
from tidegate.envs.grading.graders import verl_flexible, verl_strict
from tidegate.envs.grading.math_verify import Verifier
from tidegate.errors import ConfigError, RewardError
from tidegate.types import Task

ROWS = {
    "train": [
        ("How many are 2 and 2?", "2+2=<<2+2=4>>4\n#### 4"),
        ("And 3?", "…\n#### 1,234"),
        ("Last?", "#### -7"),
    ],
    "test": [("How many are 5 and 5?", "5+5=10\n#### 10")],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split, rows in ROWS.items():
        write(tmp_path, split, [json.dumps({"question": q, "answer": a}) for q, a in rows])
    return tmp_path


def write(directory: Path, split: str, lines: list[str]) -> None:
    (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def every_task(environment: Environment) -> list[Task]:
    size = environment.train_size()
    assert size is not None
    return [environment.train_task(index) for index in range(size)] + list(environment.eval_sets()[""])


def test_the_published_splits(data: Path) -> None:
    environment = load_environment("gsm8k", {"path": str(data)})
    (test,) = environment.eval_sets()[""]
    assert test.messages == [{"role": "user", "content": "How many are 5 and 5?"}]
    assert (test.env, test.answer, environment.gold_output(test)) == ("gsm8k", "10", "5+5=10\n#### 10")
    assert {task.answer for task in every_task(environment)} == {"4", "1234", "-7", "10"}


def test_every_epoch_has_each_problem_once_in_an_order_of_its_own(data: Path) -> None:
    write(data, "train", [json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) for n in range(50)])
    environment, again = GSM8K(str(data), seed=3), GSM8K(str(data), seed=3)
    epochs = [[environment.train_task(50 * epoch + n).id for n in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 50 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [again.train_task(120 + n).id for n in range(5)] == epochs[2][20:25]
    assert [GSM8K(str(data), seed=4).train_task(n).id for n in range(50)] != epochs[0]


def test_the_prompt_may_say_how_to_answer(data: Path) -> None:
    environment = GSM8K(str(data), prompt="{question}\nEnd with ####.", system="Be brief.")
    assert environment.eval_sets()[""][0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many are 5 and 5?\nEnd with ####."},
    ]


def test_how_the_answer_was_found_is_kept(data: Path) -> None:
    environment = GSM8K(str(data))
    (task,) = environment.eval_sets()[""]
    scored = environment.score(task, None, "The answer is $10.00", [])
    assert (scored.reward, scored.parts) == (1.0, {"correct": 1.0})
    assert scored.metrics == {
        "extractor/hash": 0.0, "extractor/boxed": 0.0, "extractor/answer_is": 1.0,
        "extractor/last_number": 0.0, "unparseable": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "tolerent"}, "no mode 'tolerent'; did you mean 'tolerant'"),
        ({"path": "../nowhere"}, "'../nowhere': there is no such directory"),
        ({"path": "FILE"}, "is a file; name the directory"),
        ({"prompt": "{qestion}"}, "train.jsonl, line 1: there is no key 'qestion'; did you mean 'question'"),
        ({"prompt": "{question!r:>9} {0}"}, "braces must contain a column's name"),
    ],
)
def test_an_invalid_option_is_refused(data: Path, options: dict, message: str) -> None:
    given = {"path": str(data), **options}
    if options.get("path") == "FILE":
        given["path"] = str(data / "test.jsonl")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_environment("gsm8k", given)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q"}', "test.jsonl, line 2: there is no key 'answer'"),
        ('{"question": "q", "answer": "12"}', "test.jsonl, line 2: 'answer' has no line '#### number'"),
        ('{"question": " ", "answer": 12}', "test.jsonl, line 2: 'answer' is 12, not a text"),
        ('{"question": "q", "answer', "test.jsonl, line 2: not valid JSON"),
    ],
)
def test_a_broken_row_is_named(data: Path, line: str, message: str) -> None:
    write(data, "test", ['{"question": "q", "answer": "#### 1"}', line])
    with pytest.raises(ConfigError, match=re.escape(message)):
        GSM8K(str(data))


def test_a_missing_split_is_named(data: Path) -> None:
    (data / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"test\.jsonl: there is no such data file"):
        GSM8K(str(data))


def test_a_hub_id_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"install Tidegate's extra 'data'"):
        GSM8K()


# ---------------------------------------------------------------- verl's two ways, against a plain reference


def plain_strict(reply: str) -> str | None:
    """Written from the published rule: what follows the first `#### ` that a number follows, an optional
    minus and then digits, dots and commas; commas and dollar signs taken out."""
    at = reply.find("#### ")
    while at >= 0:
        rest = reply[at + 5 :]
        sign, rest = ("-", rest[1:]) if rest.startswith("-") else ("", rest)
        length = 0
        while length < len(rest) and rest[length] in "0123456789.,":
            length += 1
        if length:
            return "".join(one for one in sign + rest[:length] if one not in ",$")
        at = reply.find("#### ", at + 1)
    return None


def plain_flexible(reply: str) -> str | None:
    """Written from the published rule: the last run of digits, dots and commas with an optional minus that
    is not just a dot; if all of them are, it is a dot."""
    runs: list[str] = []
    run = ""
    for sign in f"{reply} ":
        if sign in "0123456789.,":
            run += sign
            continue
        if run not in ("", "-"):
            runs.append(run)
        run = "-" if sign == "-" else ""
    real = [one for one in runs if one != "."]
    return real[-1] if real else runs[-1] if runs else None


PIECES = [
    "#### ", "####", "####  ", "#### -", "### ", "#### $", "-", "--", ".", ",", "...", "$", "%", " ", "\n",
    "0", "1", "18", "-7", "1,234", "1234", "3.50", "18.0", "018", "1/2", "٤", "²", "½", "answer", " apples",
    "#", "=", "<<", ">>", "\\boxed{18}", "e5", "−3", "x", "\t", "$18", "18.", "18,", ",18", ".5", "{", "}",
    "\u00a0", "１８",
]  # fmt: skip
GOLD = ["18", "1234", "-7", "0", "3.50", "1"]


def replies(count: int, seed: int) -> list[tuple[str, str]]:
    """Replies put together from pieces, half of them built around their gold answer, with that answer."""
    rng = Random(seed)
    made = []
    for _ in range(count):
        gold = rng.choice(GOLD)
        words = rng.choices(PIECES, k=rng.randint(0, 14))
        if rng.random() < 0.5:
            form = rng.choice(["#### {}", "#### {}.", "#### ${}", "{}", "\n#### {}\n", "is {:}", "####{}"])
            words.insert(rng.randint(0, len(words)), form.format(gold))
        made.append((rng.choice(["", " "]).join(words), gold))
    return made


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_verls_ways_equal_the_plain_reference(count: int) -> None:
    made = replies(count, seed=20240607)
    right = {"strict": 0, "flexible": 0, "none": 0}
    for reply, gold in made:
        strict, flexible = plain_strict(reply), plain_flexible(reply)
        for name, said, grade in (
            ("strict", strict, verl_strict(reply, gold)),
            ("flexible", flexible, verl_flexible(reply, gold)),
        ):
            assert grade.value == (1.0 if said == gold else 0.0), (name, reply, gold)
            assert grade.metrics["unparseable"] == (1.0 if said is None else 0.0), (name, reply)
            right[name] += said == gold
        right["none"] += strict is None
    # The replies are of every kind: a grader that always said 0, or 1, would be found out.
    assert all(0.05 * count < number < 0.95 * count for number in right.values()), right


def test_verls_ways_by_example() -> None:
    assert verl_strict("#### 1,234\n#### 5", "1234").value == 1.0
    assert verl_strict("#### 5\n#### 1,234", "1234").value == 0.0
    assert verl_strict("#### 18.", "18").value == 0.0
    assert verl_strict("####18", "18").metrics["unparseable"] == 1.0
    assert verl_flexible("first 5, then 18", "18").value == 1.0
    assert verl_flexible("it is 18.", "18").value == 0.0
    assert verl_flexible("18 is it .", "18").value == 1.0
    assert verl_flexible("1,234", "1234").value == 0.0


# ---------------------------------------------------------------- the real thing


@needs_gsm8k
@pytest.mark.parametrize(
    ("mode", "right"), [("tolerant", 8792), ("verl_strict", 8792), ("verl_flexible", 8699)]
)
def test_the_real_gold_answers(mode: str, right: int) -> None:
    """verl's flexible way leaves the commas in, so it refuses the 93 gold answers that have some."""
    environment = GSM8K(str(DATA), mode)
    tasks = every_task(environment)
    assert len({task.id for task in tasks}) == 8792
    assert len(environment.eval_sets()[""]) == 1319
    scores = [environment.score(task, None, environment.gold_output(task), []) for task in tasks]
    assert sum(scored.reward for scored in scores) == right
    if mode == "tolerant":
        assert sum(scored.metrics["extractor/hash"] for scored in scores) == right


# ---------------------------------------------------------------- math-verify, in its own process


@pytest.fixture
def judge():
    pytest.importorskip("math_verify")
    judge = Verifier()
    yield judge
    judge.close()


def test_math_verify_compares_expressions(data: Path, judge: Verifier) -> None:
    assert judge.verify("so \\boxed{\\frac{1}{2}}", "0.5").equal
    assert judge.verify("#### 18", "18").equal
    wrong = judge.verify("\\boxed{19}", "18")
    assert (wrong.parsed, wrong.equal) == (True, False)
    assert not judge.verify("no idea", "18").parsed
    assert judge.starts == 1


def test_a_comparison_that_hangs_is_ended_and_the_next_one_is_served(judge: Verifier) -> None:
    judge.verify("1", "1")
    judge.limit_s = 0.05
    with pytest.raises(RewardError, match=r"longer than 0\.05 s"):
        judge.verify("$" + "+".join(f"\\sqrt{{{n}}}" for n in range(2, 400)) + "$", "1")
    judge.limit_s = 10.0
    assert judge.verify("\\boxed{3}", "3").equal
    assert judge.starts == 2


def test_a_process_that_exited_is_replaced(judge: Verifier) -> None:
    judge.verify("1", "1")
    assert judge._process is not None
    judge._process.kill()
    judge._process.wait()
    assert judge.verify("\\boxed{3}", "3").equal
    assert judge.starts == 2


def test_math_verify_is_an_option_that_must_be_installed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs math-verify.*install Tidegate's extra 'math'"):
        GSM8K(str(data), "math_verify")
