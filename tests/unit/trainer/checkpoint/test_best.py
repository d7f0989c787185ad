"""`checkpoints/best`: which is kept, after a crash and in a resumed run; its weights are the policy's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.trainer.learning_fixtures import VOCABULARY, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import CheckpointError
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.best import BestCheckpoint
from tidegate.trainer.policy.policy import Policy


def weights(directory: Path, content: str) -> Path:
    directory.mkdir()
    for name in ("model.safetensors", "COMMITTED", "trainer.pt"):
        (directory / name).write_text(content)
    return directory


def kept(run_dir: Path) -> tuple[str, dict[str, float]]:
    best = run_dir / "checkpoints" / "best"
    return (best / "model.safetensors").read_text(), json.loads((best / "best.json").read_text())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def test_the_highest_reward_is_kept_and_of_equals_the_newer_one(run_dir: Path) -> None:
    best = BestCheckpoint.open(run_dir)
    offers = [(0, 0.4, True), (10, 0.7, True), (20, 0.6, False), (30, 0.7, True)]
    for step, reward, better in offers:
        assert (
            best.update_if_better(weights(run_dir / f"v{step}", f"step {step}"), step, step, reward) is better
        )
    assert kept(run_dir) == ("step 30", {"step": 30, "version": 30, "eval/reward": 0.7})
    names = sorted(one.name for one in (run_dir / "checkpoints").iterdir())
    assert names == ["best", "best-v30-step30"], "worse ones are gone"
    assert sorted(one.name for one in (run_dir / "checkpoints" / "best").iterdir()) == [
        "best.json", "model.safetensors",
    ]  # fmt: skip


def test_the_best_checkpoint_is_readable_by_its_owner_only(run_dir: Path) -> None:
    base = weights(run_dir / "base", "base")
    base.chmod(0o755)
    (base / "model.safetensors").chmod(0o644)
    os.umask(0o077)  # as in a run
    assert BestCheckpoint.open(run_dir).update_if_better(base, 0, 0, 0.5)
    best = (run_dir / "checkpoints" / "best").resolve()
    assert best.stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in best.iterdir()} == {0o600}


def test_a_resumed_run_knows_the_best_so_far(run_dir: Path) -> None:
    BestCheckpoint.open(run_dir).update_if_better(weights(run_dir / "a", "good"), 10, 10, 0.9)
    resumed = BestCheckpoint.open(run_dir)
    assert resumed.reward == 0.9
    assert not resumed.update_if_better(weights(run_dir / "b", "worse"), 10, 12, 0.8)
    assert kept(run_dir)[0] == "good"
    assert resumed.update_if_better(weights(run_dir / "c", "better"), 10, 13, 0.95), (
        "the same step, taken again"
    )
    assert kept(run_dir)[0] == "better"


@pytest.mark.parametrize("when", ["copytree", "replace"])
def test_a_crash_leaves_the_best_before_it_whole(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    BestCheckpoint.open(run_dir).update_if_better(weights(run_dir / "a", "good"), 10, 10, 0.5)
    later = weights(run_dir / "b", "better")

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree" if when == "copytree" else "os.replace", die)
        with pytest.raises(KeyboardInterrupt):
            BestCheckpoint.open(run_dir).update_if_better(later, 20, 20, 0.6)
    assert kept(run_dir) == ("good", {"step": 10, "version": 10, "eval/reward": 0.5})
    assert BestCheckpoint.open(run_dir).update_if_better(later, 20, 21, 0.6)
    assert kept(run_dir)[0] == "better"
    assert len(list((run_dir / "checkpoints").iterdir())) == 2, "what the crash left is gone"


def test_a_damaged_record_is_named(run_dir: Path) -> None:
    BestCheckpoint.open(run_dir).update_if_better(weights(run_dir / "a", "good"), 10, 10, 0.5)
    (run_dir / "checkpoints" / "best" / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json cannot be read"):
        BestCheckpoint.open(run_dir)


def test_it_is_the_policy_for_plain_transformers_and_pruning_leaves_it(tmp_path: Path) -> None:
    policy = Policy.load(make_model(tmp_path / "base"), TrainerSettings(learning_rate=0.02), 0)
    policy.update(make_rows(4), version=0)
    best = BestCheckpoint.open(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, step, policy, {})
    best.update_if_better(policy.save_weights(tmp_path / "weights" / "v1"), 1, 1, 0.5)
    ids = torch.randint(0, VOCABULARY, (2, 17))
    with torch.no_grad():
        expected = policy.model(ids).logits.clone()
    policy.update(make_rows(4, seed=1), version=1)
    checkpoints.prune(tmp_path, keep=1)
    place = tmp_path / "checkpoints" / "best"
    assert os.path.islink(place)
    loaded = AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected)
    assert AutoTokenizer.from_pretrained(place).chat_template


def test_of_several_policies_the_model_of_each_is_kept(run_dir: Path) -> None:
    version = run_dir / "weights" / "v000002"
    for name in ("solver", "verifier"):
        (version / name).mkdir(parents=True)
        (version / name / "config.json").write_text(name)
    assert BestCheckpoint.open(run_dir).update_if_better(version, step=2, version=2, reward=0.5)
    best = run_dir / "checkpoints" / "best"
    assert {path.parent.name: path.read_text() for path in best.glob("*/config.json")} == {
        "solver": "solver",
        "verifier": "verifier",
    }


def test_a_base_model_with_models_in_directories_is_kept_whole(run_dir: Path) -> None:
    """As a trainer leaves it: the model, and its own checkpoints beside it."""
    base = weights(run_dir / "base", "base")
    inner = weights(base / "checkpoint-500", "earlier")
    for directory in (base, inner):
        (directory / "config.json").write_text("{}")
    assert BestCheckpoint.open(run_dir).update_if_better(base, 0, 0, 0.5)
    assert kept(run_dir)[0] == "base"
