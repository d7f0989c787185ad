"""`tidegate sft` as a process: killed anywhere, it ends with the same weights; a run starts from them."""

from __future__ import annotations

import functools
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from examples.tiny_base.make import demonstration
from tests.e2e.runs import DEMO, ENVIRONMENT, REPO, metrics, start_until_complete
from tidegate.agents.solver import TOOLS
from tidegate.cli import main
from tidegate.envs.arithmetic import draw_problem, substitute_numbers
from tidegate.failpoints import PASSED, VARIABLE
from tidegate.trainer.ledger.audit import audit_run

SETTINGS = [
    "--run.live_view=false", "--sft.batch_size=8", "--sft.epochs=2", "--sft.learning_rate=1e-3",
    "--eval.every=3", "--sft.validation=0.1", "--trainer.checkpoint_every=3", "--trainer.keep_checkpoints=1",
]  # fmt: skip
TIMES = {"time", "time/step", "time/update"}
TINY_RUN = [
    "--trainer.steps=1", "--trainer.groups_per_batch=2", "--trainer.group_size=4", "--eval.tasks=4",
    "--eval.every=0", "--agent.max_concurrency=16", "--trainer.dynamic_sampling=false",
]  # fmt: skip

pytestmark = pytest.mark.timeout(600)  # each process imports torch


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right solutions of 40 problems of the demo."""
    rng, lines = random.Random(0), []
    while len(lines) < 40:
        problem = draw_problem(rng)
        if not problem.held_out:
            right = substitute_numbers(problem.template.expression, problem.numbers)
            chat = {"messages": demonstration(problem.question, right), "tools": TOOLS}
            lines.append(json.dumps(chat))
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("\n".join(lines))
    return path


def command(parent: Path, name: str, chats: Path, *arguments: str) -> list[str]:
    place = [f"--run.dir={parent}", f"--run.name={name}", f"--sft.chats={chats}"]
    return ["sft", str(DEMO), *place, *SETTINGS, *arguments]


def sft(parent: Path, name: str, chats: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", *command(parent, name, chats, *arguments)],
        cwd=REPO, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without times."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics(run_dir)]


Whole = Callable[..., Path]
RESULT = "model/model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Whole:
    """The directory of a fine-tuning that is not killed; one is run for each settings."""

    @functools.cache
    def run(*more: str) -> Path:
        parent = tmp_path_factory.mktemp("whole")
        ended = sft(parent, "whole", chats, *more)
        assert ended.returncode == 0, ended.stderr
        return parent / "whole-sft"

    return run


def test_a_fine_tuning_evaluates_validates_and_saves_its_model(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    assert main(command(tmp_path, "whole", chats)) == 0
    assert "36 sequences, 4 for validation, 10 steps" in capsys.readouterr().err
    run_dir = tmp_path / "whole-sft"
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(11))
    assert [line["step"] for line in lines if "validation/loss" in line] == [0, 3, 6, 9, 10]
    assert (run_dir / RESULT).exists()


EVERYWHERE = [
    "config.before", "config.after", "metrics.truncated.before", "metrics.truncated.after",
    "metrics.line.before:3", "metrics.line.after:2", "checkpoint.weights.before", "checkpoint.weights.after",
    "checkpoint.state.after", "checkpoint.marker.before", "checkpoint.marker.after",
    "checkpoint.unmarked.before", "checkpoint.unmarked.after", "checkpoint.removed.after",
    "sft.model.before", "sft.model.after",
]  # fmt: skip
WEIGHTS = ["metrics.line.after:2", "checkpoint.weights.before", "checkpoint.weights.after"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("points", "more"),
    [
        (EVERYWHERE, []),
        (WEIGHTS, ["--trainer.lora.rank=4", "--trainer.activation_checkpointing=true"]),
        (["checkpoint.weights.before", "checkpoint.state.after"], ["--trainer.ranks=2"]),
    ],
)
def test_a_fine_tuning_killed_at_every_write_ends_with_the_same_weights(
    tmp_path: Path, chats: Path, whole: Whole, points: list[str], more: list[str]
) -> None:
    passed = tmp_path / "passed"
    passed.mkdir()
    armed = {**ENVIRONMENT, VARIABLE: ",".join(points), PASSED: str(passed)}
    again = command(tmp_path, "killed", chats, *more)
    killed, right = tmp_path / "killed-sft", whole(*more)
    codes = start_until_complete(killed, *again, environment=armed, resume="--resume")
    assert codes == [-signal.SIGKILL] * len(points) + [0]
    assert (right / RESULT).read_bytes() == (killed / RESULT).read_bytes()
    assert numbers(right) == numbers(killed)
    assert [line["step"] for line in metrics(killed)] == list(range(11))


@pytest.mark.slow
def test_two_ranks_train_as_one(whole: Whole) -> None:
    runs = [whole(), whole("--trainer.ranks=2")]
    one, two = (load_file(run / RESULT) for run in runs)
    assert one.keys() == two.keys()
    assert max(float(abs(one[name] - two[name]).max()) for name in one) < 1e-3
    for first, second in zip(*map(numbers, runs), strict=True):
        assert first.keys() == second.keys()
        for name in {"loss", "validation/loss"} & first.keys():
            assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("setting", "code", "why"),
    [
        ("--trainer.teacher.path=nowhere", 3, "path = nowhere has no config.json"),
        ("--env.judge={url = 'http://j/v1', model = 'm', rubric_file = 'nowhere'}", 2, "rubric_file"),
    ],
)
def test_what_refuses_the_training_is_found_before_the_fine_tuning(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    setting: str, code: int, why: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(REPO)
    assert main(command(tmp_path, "both", chats, "--then", "train", *TINY_RUN, setting)) == code
    assert why in capsys.readouterr().err
    assert not (tmp_path / "both-sft").exists()


@pytest.mark.slow
def test_a_run_continues_from_the_result(tmp_path: Path, chats: Path) -> None:
    ended = sft(tmp_path, "both", chats, "--sft.epochs=1", "--then", "train", *TINY_RUN)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    run = tmp_path / "both"
    assert str(tmp_path / "both-sft" / "model") in (run / "config.toml").read_text()
    assert [line["step"] for line in metrics(run)] == [0, 1]
    assert audit_run(run).consistent
    again = sft(tmp_path, "both", chats, "--sft.epochs=1", "--resume")
    assert (again.returncode, "has taken all its 5 steps" in again.stderr) == (0, True), again.stderr
