"""A run with a teacher: groups of one episode, a teacher that is killed, replay, and a wrong teacher."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests import REPO
from tests.documented import unexplained
from tests.e2e.runs import gone, held, metrics, training
from tidegate.cli import main
from tidegate.trainer.records.trajectories import decode_trajectory, read_lines, step_files

MODEL = REPO / "examples" / "tiny_base" / "model"
ALONE = ["--trainer.teacher.reward_weight=0", "--trainer.group_size=1", "--trainer.groups_per_batch=8"]


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_alone_though_it_is_killed(tmp_path: Path) -> None:
    """The teacher is the student's own base model, so its logprobs are those of the first version."""
    run_dir = tmp_path / "distilled"
    arguments = [
        f"--trainer.teacher.path={MODEL}", *ALONE, "--trainer.steps=4", "--trainer.max_staleness=0",
        "--trainer.teacher.form=distribution", "--trainer.teacher.top_k=4",
    ]  # fmt: skip
    with training(run_dir, *arguments) as run:
        run.until_step(1)
        first = run.owned("teacher")
        os.kill(first, signal.SIGKILL)
        run.until_said("the teacher is back")
        assert run.wait() == 0, run.output()[-3000:]
    last = run.owned("teacher")
    assert last != first
    assert gone(last)
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert not unexplained({key for line in lines for key in line})
    assert abs(lines[1]["teacher/kl"]) < 1e-5, "the first version is the teacher"
    assert abs(lines[1]["loss"]) < 1e-5
    assert all(line["teacher/logprob"] < 0 for line in lines[1:])
    assert all(line["groups/filtered"] == 0 for line in lines)
    held(run_dir)
    for step, path in step_files(run_dir).items():
        turns = [turn for line in read_lines(path) for turn in decode_trajectory(line).turns]
        assert all(turn.teacher_logprobs is not None for turn in turns)
        assert all(turn.teacher_top_k == 4 for turn in turns)
        if step == 1:
            for turn in turns:
                np.testing.assert_allclose(turn.teacher_logprobs, turn.logprobs, atol=1e-4)
    assert main(["replay", str(run_dir)]) == 0, "to the last bit, without the teacher"


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.__getitem__)[100:102]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with training(tmp_path / "refused", f"--trainer.teacher.path={other}", *ALONE) as run:
        assert run.wait() != 0
        assert "has another tokenizer than the student" in " ".join(run.output().split())
