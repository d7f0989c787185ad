"""`tidegate train` as a user runs it, with a real engine, gateway, openai client and agents."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import documented, unexplained
from tests.e2e.runs import ENVIRONMENT, REPO, gone, held, metrics, training
from tidegate.trainer.ledger.ledger import read_ledger


@pytest.mark.timeout(300)  # two runs with their processes, and evaluations
def test_a_small_run_from_begin_to_end_then_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "small"
    with training(run_dir, "--trainer.steps=4", "--eval.every=2") as run:
        assert run.wait() == 0, run.output()
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {"eval/reward", "eval/reward_greedy", "eval/reward_unseen_templates"} <= set(lines[0])
    assert {"eval/reward", "eval/reward_greedy"} <= set(lines[-1])
    assert max(line["staleness/max"] for line in lines[1:]) <= 2
    assert max(line["logprob_max_error"] or 0 for line in lines[1:]) < 1e-3
    every_key_is_documented_and_there(lines)
    audit = held(run_dir)
    assert (audit.groups["trained"], audit.attempts["trained"]) == (16, 64)
    assert audit.groups["stepped"] == audit.groups["live"] == 0
    assert (run_dir / "report.html").exists()
    assert (run_dir / "reward.png").exists()
    assert (run_dir / "checkpoints" / "step_4" / "COMMITTED").exists()
    best = best_of(run_dir)
    rewards = {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}
    assert best["eval/reward"] == max(rewards.values()) == rewards[best["step"]]
    assert "checkpoints/best" in "".join(run.output().split())
    for child in ("engine", "gateway"):
        assert gone(run.owned(child))

    curriculum = "--trainer.curriculum.name=difficulty"
    with training(run_dir, "--trainer.steps=6", "--resume", curriculum) as run:
        assert run.wait() == 0, run.output()
    assert "trainer.steps 4 → 6" in " ".join(run.output().split())
    lines = metrics(run_dir)
    assert 0 < lines[-1]["curriculum/informative"] <= 1
    assert lines[-1]["curriculum/skipped"] >= 0
    assert unexplained(lines[-1]) == set()
    ended = [one for one in read_ledger(run_dir / "ledger.jsonl") if one.get("state") == "filtered"]
    alike = [one["solved"] in (0, one["episodes"]) for one in ended if one["kind"] == "group"]
    counted = lines[-1]["groups/filtered_solved"] + lines[-1]["groups/filtered_failed"]
    assert (all(alike), counted) == (True, lines[-1]["groups/filtered"])
    assert best_of(run_dir)["eval/reward"] == max(lines[-1]["eval/reward"], best["eval/reward"])
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert lines[-1]["version"] > lines[4]["version"] + 1, "the restored weights got a version of their own"
    assert held(run_dir).groups["trained"] == 24

    before = (run_dir / "ledger.jsonl").read_bytes()
    code, said = tidegate("train", f"{run_dir}/config.toml", "--resume", torch=False)
    assert (code, "has taken 6 steps" in said) == (0, True), said
    assert (run_dir / "ledger.jsonl").read_bytes() == before
    other = "--model.path=examples/search_base/model"
    code, said = tidegate(
        "train", f"{run_dir}/config.toml", "--resume", "--trainer.steps=8", other, torch=False
    )
    assert (code, "began with examples/tiny_base/model" in said) == (2, True), said


def every_key_is_documented_and_there(lines: list[dict[str, float]]) -> None:
    assert unexplained({key for line in lines for key in line}) == set()
    when = documented()
    for line in lines:
        known = {"line"}
        known |= {"step", "steps that publish"} if line["step"] else set()
        known |= {"eval"} if "eval/reward" in line else set()
        assert {key for key in when if when[key] in known} <= line.keys()


def best_of(run_dir: Path) -> dict[str, float]:
    place = run_dir / "checkpoints" / "best"
    assert (place / "model.safetensors").exists()
    found: dict[str, float] = json.loads((place / "best.json").read_text())
    return found


def test_ctrl_c_commits_and_the_run_can_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "interrupted"
    with training(
        run_dir, "--trainer.steps=1000", "--trainer.checkpoint_every=1000", "--eval.every=1000"
    ) as run:
        run.until_step(2)
        run.interrupt()
        assert run.wait(60) == 130, run.output()
        assert "--resume" in run.output()
    last = metrics(run_dir)[-1]["step"]
    audit = held(run_dir)
    assert audit.groups["trained"] == 4 * audit.steps
    assert audit.steps >= last
    assert audit.groups["live"] == audit.groups["stepped"] == 0

    # Every reward reaches 0: the run ends at the next evaluation.
    with training(run_dir, "--resume", "--trainer.steps=1000", "--eval.every=1", "--trainer.until=0") as run:
        assert run.wait() == 0, run.output()
    assert "reached trainer.until = 0" in " ".join(run.output().split())
    *_, line = metrics(run_dir)
    assert (line["step"], line["eval/episodes"]) == (audit.steps + 1, 16), "confirmed on all tasks"
    audit = held(run_dir)
    assert audit.groups["trained"] == 4 * audit.steps == 4 * line["step"]
    code, said = tidegate("train", f"{run_dir}/config.toml", "--resume", torch=False)
    assert (code, "reached trainer.until = 0" in said) == (0, True), said


@pytest.mark.slow
def test_weights_that_are_served_outlive_the_checkpoint_they_came_from(tmp_path: Path) -> None:
    """A resumed run that rarely publishes serves a checkpoint's weights after the checkpoint was pruned."""
    run_dir = tmp_path / "seldom"
    seldom = [
        "--trainer.publish_interval=never", "--trainer.max_staleness=none", "--trainer.checkpoint_every=1",
        "--trainer.keep_checkpoints=1", "--eval.every=1", "--trainer.learning_rate=0",
    ]  # fmt: skip
    with training(run_dir, "--trainer.steps=1", *seldom) as run:
        assert run.wait() == 0, run.output()
    with training(run_dir, "--trainer.steps=4", "--resume", *seldom) as run:
        assert run.wait() == 0, run.output()
    kept = sorted(one.name for one in (run_dir / "checkpoints").glob("step_*"))
    assert kept == ["step_1", "step_4"]


BROKEN = """
from tidegate.agents.base import agent

@agent
async def raises(task, session):
    raise RuntimeError("my tool server is down")

@agent
async def never_calls(task, session):
    return "#### 4"
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "my tool server is down"),
        pytest.param("never_calls", "never called the gateway", marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_can_only_fail_stops_the_run_and_says_why(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with training(tmp_path / "run", f"--agent.use={tmp_path}/broken.py:{name}") as run:
        assert run.wait() == 1, run.output()
    output = " ".join(run.output().split())
    assert words in output
    assert "Traceback" not in output.replace("Traceback (most recent call last): File", "")
    assert held(tmp_path / "run").groups.total() == 0, "it was found out before the first group"


def tidegate(*arguments: str, torch: bool = True) -> tuple[int, str]:
    """Exit code and stderr of a verb; with `torch=False`, torch cannot be imported."""
    code = "import sys\n" + ("" if torch else "sys.modules['torch'] = None\n")
    code += "from tidegate.cli import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPO, capture_output=True, text=True, env=ENVIRONMENT, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stderr


DEMO = "examples/demo/config.toml"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--trainer.max_stalness", "2"], 2, "did you mean 'trainer.max_staleness'?"),
        (["--trainer.min_group_size", "9"], 2, "min_group_size = 9 is more than group_size = 8"),
        (["--model.path", "nowhere"], 3, "nowhere: there is no such directory"),
        (["--model.path", "examples/demo"], 3, "config.json is missing"),
        (["--agent.use", "solvr"], 2, "did you mean 'solver'?"),
        (["--env.use", "arithmetics"], 2, "did you mean 'arithmetic'?"),
        (["--gateway.host", "0.0.0.0"], 2, "set gateway.admin_key"),
        (["--run.dir", "Makefile"], 3, "run.dir = Makefile: cannot write Makefile/demo: "),
        (["--run.name", "../x"], 2, "must be the name of a directory in run.dir"),
        (["--engine.urls", '["http://127.0.0.1:9"]'], 3, "engine.urls: no engine answers at"),
    ],
)
def test_a_wrong_setting_is_one_clear_sentence_before_torch_is_imported(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    found, said = tidegate("train", DEMO, f"--run.dir={tmp_path}", *arguments, torch=False)
    assert (found, words in said, "Traceback" in said) == (code, True, False), said
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(
    "arguments", [["train", DEMO], ["engine", "--model.path=examples/tiny_base/model"], ["replay", "RUN"]]
)
def test_without_torch_one_sentence_says_what_to_install(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "examples/tiny_base/model"\n')
    (tmp_path / "ledger.jsonl").touch()
    place = [f"--run.dir={tmp_path}"] if arguments[0] == "train" else []
    words = [str(tmp_path) if one == "RUN" else one for one in arguments]
    code, said = tidegate(*words, *place, torch=False)
    needs = "needs torch, which is not installed: pip install 'tidegate[train]'"
    assert (code, said) == (3, f"tidegate: `tidegate {words[0]}` {needs}\n")


def test_a_device_that_is_not_there_is_named_before_anything_is_written(tmp_path: Path) -> None:
    code, said = tidegate("train", DEMO, f"--run.dir={tmp_path}", "--trainer.device=cuda:77")
    assert (code, "trainer.device = 'cuda:77': " in said, "Traceback" in said) == (3, True, False), said
    assert "This machine has: cpu" in said
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with training(tmp_path / "run", f"--gateway.port={port}") as run:
            assert run.wait() == 3, run.output()
        assert f"cannot listen on 127.0.0.1:{port}" in " ".join(run.output().split())


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "ledger.jsonl").write_text("")
    code, said = tidegate("train", DEMO, f"--run.dir={tmp_path}", torch=False)
    assert code == 2
    assert "--resume" in said
    code, said = tidegate("train", DEMO, f"--run.dir={tmp_path}", "--run.name=other", "--resume", torch=False)
    assert code == 2
    assert "holds no run to resume" in said


def test_audit_of_a_directory_that_is_no_run(tmp_path: Path) -> None:
    code, said = tidegate("audit", str(tmp_path))
    assert code != 0
    assert "Traceback" not in said
