"""`tidegate train` as a user runs it, with a real engine, gateway, openai client and agents."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.documented import documented, unexplained
from tests.e2e.nosy import check_secrecy, nosy
from tests.e2e.runs import DEMO, ENVIRONMENT, REPO, ends, gone, held, metrics, training
from tests.unprivileged import unprivileged
from tidegate.cli import main
from tidegate.program import advise_extra
from tidegate.trainer.ledger.ledger import read_ledger
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.records.trajectories import read_lines


@pytest.mark.timeout(300)  # a run with its processes, and evaluations
def test_a_small_run_completes(tmp_path: Path) -> None:
    run_dir = tmp_path / "small"
    settings = [nosy(tmp_path, run_dir), "--trainer.steps=2", "--eval.every=2"]
    with training(run_dir, *settings, before=unprivileged) as run:
        assert run.wait() == 0, run.output()
        assert all(gone(run.owned(child)) for child in ("engine", "gateway"))
    assert "checkpoints/best" in "".join(run.output().split())
    check_secrecy(tmp_path, run_dir)
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1]["eval/episodes"] == 16, "on all tasks"
    assert {"eval/reward", "eval/reward_greedy", "eval/reward_unseen_templates"} <= set(lines[0])
    assert {"eval/reward", "eval/reward_greedy"} <= set(lines[-1])
    assert max(line["staleness/max"] for line in lines[1:]) <= 2
    assert max(line["logprob_max_error"] or 0 for line in lines[1:]) < 1e-3
    every_key_is_documented_and_there(lines)
    audit = held(run_dir)
    assert (audit.groups["trained"], audit.attempts["trained"]) == (2 * 4, 2 * 16)
    assert audit.groups["stepped"] == audit.groups["live"] == 0
    ended = [one for one in read_ledger(run_dir / "ledger.jsonl") if one.get("state") == "filtered"]
    alike = [one["solved"] in (0, one["episodes"]) for one in ended if one["kind"] == "group"]
    counted = lines[-1]["groups/filtered_solved"] + lines[-1]["groups/filtered_failed"]
    assert (all(alike), counted) == (True, lines[-1]["groups/filtered"])
    assert ends(run_dir) == [("completed", None)]
    assert (run_dir / "report.html").exists()
    assert (run_dir / "reward.png").exists()
    assert (run_dir / "checkpoints" / "step_2" / "COMMITTED").exists()
    check_best(run_dir)


def every_key_is_documented_and_there(lines: list[dict[str, float]]) -> None:
    assert unexplained({key for line in lines for key in line}) == set()
    when = documented()
    for line in lines:
        known = {"line"}
        known |= {"step", "steps that publish"} if line["step"] else set()
        known |= {"eval"} if "eval/reward" in line else set()
        assert {key for key in when if when[key] in known} <= line.keys()


def check_best(run_dir: Path) -> None:
    place = run_dir / "checkpoints" / "best"
    assert (place / "model.safetensors").exists()
    best = json.loads((place / "best.json").read_text())
    rewards = {line["step"]: line["eval/reward"] for line in metrics(run_dir) if "eval/reward" in line}
    assert best["eval/reward"] == max(rewards.values()) == rewards[best["step"]]


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
    assert ends(run_dir) == [("completed", None)] * 2
    before = (run_dir / "ledger.jsonl").read_bytes()
    ((code, said),) = tidegates(["train", f"{run_dir}/config.toml", "--resume"])
    assert (code, "has taken 4 steps" in said) == (0, True), said
    assert (run_dir / "ledger.jsonl").read_bytes() == before


BROKEN = """
from tidegate.agents.base import agent

@agent
async def raises(task, session):
    raise RuntimeError("my tool server is down")

@agent
async def never_calls(task, session):
    return "#### 4"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [("raises", "my tool server is down"), ("never_calls", "never called the gateway")],
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


EQUAL = """
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import Reward

class Equal(Arithmetic):
    rewards = (Reward("same", lambda output: 1.0),)
"""


@pytest.mark.slow
def test_a_run_whose_groups_are_all_filtered_shows_them_and_why_it_failed(tmp_path: Path) -> None:
    run_dir = tmp_path / "equal"
    (tmp_path / "equal.py").write_text(EQUAL)
    few = ["--trainer.group_size=2", "--trainer.groups_per_batch=2", "--eval.every=0", "--eval.tasks=4"]
    with training(run_dir, f"--env.use={tmp_path}/equal.py:Equal", *few) as run:
        assert run.wait() == 1, run.output()
    ((status, why),) = ends(run_dir)
    found = re.search(r"(\d+) groups were filtered since the last step", why or "")
    assert status == "failed"
    assert found, why
    filtered = list(read_lines(run_dir / "trajectories" / "step_000001.jsonl"))
    assert {line["state"] for line in filtered} == {"filtered"}
    groups = held(run_dir).groups["filtered"]  # the trainer may have leased another one with the last
    assert len({line["session_id"] for line in filtered}) == len(filtered) == 2 * groups
    assert 256 <= int(found[1]) <= groups <= 258
    steps = run.output().rpartition("Next steps")[2]
    for command in (f"view {run_dir}", f"{run_dir}/logs", f"doctor {run_dir}/config.toml", "--resume"):
        assert command in steps
    assert not [command for command in ("tidegate engine", "tidegate init") if command in steps]


SOLVED = """
import itertools
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import Reward

calls = itertools.count()

def score(output):
    number = next(calls)
    return float(number % 2) if number < 80 else 1.0

class Solved(Arithmetic):
    rewards = (Reward("solved", score),)
"""


@pytest.mark.slow
def test_a_run_whose_tasks_are_all_solved_completes_with_its_last_evaluation(tmp_path: Path) -> None:
    run_dir = tmp_path / "solved"
    (tmp_path / "solved.py").write_text(SOLVED)
    few = [
        "--trainer.group_size=2", "--trainer.groups_per_batch=2", "--eval.every=0", "--eval.tasks=4",
        "--trainer.steps=200",
    ]  # fmt: skip
    with training(run_dir, f"--env.use={tmp_path}/solved.py:Solved", *few) as run:
        assert run.wait() == 0, run.output()
    ((status, why),) = ends(run_dir)
    assert status == "completed"
    assert "nothing is left to learn" in (why or "")
    lines = read_metrics(run_dir)
    assert 1 < len(lines) < 100
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert (lines[-1]["eval/reward"], lines[-1]["eval/reward_greedy"]) == (1.0, 1.0)
    assert "reward/mean" in lines[-1]
    assert held(run_dir).findings == []


TOGETHER = """
import contextlib, io, json, sys
if sys.argv[2] == "without torch":
    sys.modules["torch"] = None
from tidegate.cli import main
results = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(arguments)
    results.append((code, said.getvalue()))
print(json.dumps(results))
"""


def tidegates(*commands: Sequence[str], torch: bool = False) -> list[tuple[int, str]]:
    """Exit code and stderr of each command, one after the other in one process, where torch cannot be
    imported unless `torch`."""
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, json.dumps(commands), "with torch" if torch else "without torch"],
        cwd=REPO, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0
    return [(code, said) for code, said in json.loads(done.stdout.splitlines()[-1])]


WRONG: list[tuple[list[str], int, str]] = [
    (["--trainer.max_stalness", "2"], 2, "did you mean 'trainer.max_staleness'?"),
    (["--trainer.min_group_size", "9"], 2, "min_group_size = 9 is more than group_size = 8"),
    (["--model.path", "nowhere"], 3, "nowhere: there is no such directory"),
    (["--model.path", "examples/demo"], 3, "examples/demo has no config.json"),
    (["--agent.use", "solvr"], 2, "did you mean 'solver'?"),
    (["--env.use", "arithmetics"], 2, "did you mean 'arithmetic'?"),
    (["--gateway.host", "0.0.0.0"], 2, "set gateway.admin_key"),
    (["--run.dir", "Makefile"], 3, "run.dir = Makefile: cannot write Makefile/demo: "),
    (["--run.name", "../x"], 2, "must be the name of a directory in run.dir"),
    (["--engine.urls", '["http://127.0.0.1:9"]'], 3, "engine.urls: no engine answers at"),
]


def test_a_wrong_setting_is_one_clear_sentence_before_torch_is_imported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = [*WRONG, (["--gateway.port", str(port)], 3, f"cannot listen on 127.0.0.1:{port}: ")]
        place = f"--run.dir={tmp_path}"
        results = tidegates(*(["train", str(DEMO), place, *arguments] for arguments, _, _ in wrong))
    for (arguments, code, words), (found, said) in zip(wrong, results, strict=True):
        assert (found, words in said, said.count("\n")) == (code, True, 1), (arguments, said)
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_without_torch_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "examples/tiny_base/model"\n')
    (tmp_path / "ledger.jsonl").touch()
    engine = ["engine", "--model.path=examples/tiny_base/model"]
    commands = [["train", str(DEMO), f"--run.dir={tmp_path}"], engine, ["replay", str(tmp_path)]]
    needs = f"needs torch, which is not installed: {advise_extra('train')}"
    for command, result in zip(commands, tidegates(*commands), strict=True):
        assert result == (3, f"tidegate: `tidegate {command[0]}` {needs}\n")


def test_a_device_that_is_not_there_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    assert main(["train", str(DEMO), f"--run.dir={tmp_path}", "--trainer.device=cuda:77"]) == 3
    said = capsys.readouterr().err
    assert "trainer.device = 'cuda:77': " in said
    assert "this machine has cpu" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ([], 2, "--resume"),
        (["--run.name=other", "--resume"], 2, "holds no run to resume"),
    ],
)
def test_a_directory_that_holds_a_run_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, why: str
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "ledger.jsonl").write_text("")
    assert main(["train", str(DEMO), f"--run.dir={tmp_path}", *words]) == code
    assert why in capsys.readouterr().err
