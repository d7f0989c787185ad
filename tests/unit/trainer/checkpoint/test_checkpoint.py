import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import REPO
from tests.unit.trainer.learning_fixtures import make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import CheckpointError
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.policy.policy import Policy

STATE = {"ledger": 1234, "version": 7, "highest_version": 9, "cursor": {"epoch": 1, "at": 3}, "epoch": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def load(base: Path, seed: int = 0) -> Policy:
    return Policy.load(base, TrainerSettings(learning_rate=0.02, warmup_steps=5), seed)


def parameters_of(policy: Policy) -> list[torch.Tensor]:
    return [one.detach().clone() for one in policy.model.parameters()]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


class Killed(BaseException):
    """The process ends here: nothing that comes after runs."""


def test_a_resumed_step_is_the_uninterrupted_one_bit_for_bit(base, tmp_path):
    policy = load(base)
    for step in range(3):
        policy.update(make_rows(4, seed=step), version=step)
    checkpoints.save(tmp_path, 3, policy, STATE)
    expected = []
    for step in range(3, 6):
        metrics = policy.update(make_rows(4, seed=step), version=step)
        expected.append((metrics["loss"], metrics["grad_norm"], torch.rand(2).tolist()))

    resumed = load(base, seed=99)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert (found.step, found.path) == (3, tmp_path / "checkpoints" / "step_3")
    checkpoints.load(found, resumed)
    again = []
    for step in range(3, 6):
        metrics = resumed.update(make_rows(4, seed=step), version=step)
        again.append((metrics["loss"], metrics["grad_norm"], torch.rand(2).tolist()))
    assert again == expected
    assert all(map(torch.equal, parameters_of(resumed), parameters_of(policy)))


def test_the_marker_gives_back_what_was_put_in(base, tmp_path):
    path = checkpoints.save(tmp_path, 12, load(base), STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.state == {**STATE, "step": 12}
    marker = json.loads((path / "COMMITTED").read_text())
    assert {key: marker[key] for key in found.state} == found.state


def test_a_checkpoint_is_a_model_that_anyone_can_load(base, tmp_path):
    path = checkpoints.save(tmp_path, 1, load(base), STATE)
    AutoModelForCausalLM.from_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).chat_template
    load(path)


def test_without_a_checkpoint_none_is_found(tmp_path):
    assert checkpoints.latest(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoints.latest(tmp_path) is None


def test_steps_are_ordered_as_numbers(base, tmp_path):
    policy = load(base)
    for step in (9, 100, 25):
        checkpoints.save(tmp_path, step, policy, STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.step == 100


@pytest.mark.parametrize("when", ["weights", "state", "marker"])
def test_what_a_killed_process_left_is_not_a_checkpoint(base, tmp_path, monkeypatch, when):
    policy = load(base)
    checkpoints.save(tmp_path, 1, policy, STATE)

    def die(*_: object) -> None:
        raise Killed

    victim = {
        "weights": (policy, "save_state"),
        "state": (checkpoints, "sync_tree"),
        "marker": (checkpoints, "_commit"),
    }[when]
    with monkeypatch.context() as patch:
        patch.setattr(*victim, die)
        with pytest.raises(Killed):
            checkpoints.save(tmp_path, 2, policy, STATE)
    assert names(tmp_path) == ["step_1", "step_2"]
    assert (tmp_path / "checkpoints" / "step_2" / "model.safetensors").exists()
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    # The same step can be written over what is left.
    checkpoints.save(tmp_path, 2, policy, STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.step == 2
    checkpoints.load(found, load(base))


def test_everything_is_on_disk_before_the_marker_is(base, tmp_path, monkeypatch):
    """Each file and each list of names is synced after its last change and before the marker appears."""
    synced: list[tuple[str, bool]] = []
    marker = tmp_path / "checkpoints" / "step_1" / "COMMITTED"

    def note(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((str(path.relative_to(tmp_path / "checkpoints")), marker.exists()))

    monkeypatch.setattr(os, "fsync", note)
    path = checkpoints.save(tmp_path, 1, load(base), STATE)
    files = {f"step_1/{one.name}" for one in path.iterdir()} - {"step_1/COMMITTED"}
    before = {name for name, marked in synced if not marked}
    assert before == {*files, "step_1", ".", "step_1/.COMMITTED.partial"}
    assert synced[-1] == ("step_1", True)


def test_a_committed_step_keeps_its_files_and_gets_the_new_state(base, tmp_path):
    policy = load(base)
    path = checkpoints.save(tmp_path, 5, policy, STATE)
    written = (path / "model.safetensors").stat().st_mtime_ns
    checkpoints.save(tmp_path, 5, policy, {**STATE, "ledger": 5678})
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.state["ledger"] == 5678
    assert (path / "model.safetensors").stat().st_mtime_ns == written


def test_pruning_keeps_the_newest_and_the_protected(base, tmp_path):
    policy = load(base)
    for step in range(1, 7):
        checkpoints.save(tmp_path, step, policy, STATE)
    (tmp_path / "checkpoints" / "step_7").mkdir()
    (tmp_path / "checkpoints" / ".step_8.partial").mkdir()
    removed = checkpoints.prune(tmp_path, keep=2, protect=[2])
    assert names(tmp_path) == ["step_2", "step_5", "step_6"]
    assert len(removed) == 5
    assert checkpoints.prune(tmp_path, keep=2, protect=[2]) == []


def test_pruning_keeps_the_live_weights_of_each_checkpoint_that_it_keeps(base, tmp_path):
    """A resume from the one before the newest, as after a roll-back of the newest, serves these weights."""
    policy = load(base)
    for step, live in ((1, 1), (2, 2), (3, 2), (4, 4)):
        checkpoints.save(tmp_path, step, policy, {**STATE, "live_step": live})
    checkpoints.prune(tmp_path, keep=2, protect=[4])
    assert names(tmp_path) == ["step_2", "step_3", "step_4"]
    checkpoints.remove(tmp_path / "checkpoints" / "step_4")
    newest = checkpoints.latest(tmp_path)
    assert newest is not None
    assert checkpoints.live(tmp_path, newest).step == 2


def test_live_weights_that_are_missing_are_an_error_that_says_what_to_do(base, tmp_path):
    path = checkpoints.save(tmp_path, 3, load(base), {**STATE, "live_step": 2})
    with pytest.raises(CheckpointError, match=r"step_3.*live weights.*step 2.*remove .*step_3"):
        checkpoints.live(tmp_path, checkpoints.read(path))


def test_a_checkpoint_half_pruned_is_not_a_checkpoint(base, tmp_path, monkeypatch):
    policy = load(base)
    for step in (1, 2):
        checkpoints.save(tmp_path, step, policy, STATE)

    def die(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(Killed):
        checkpoints.prune(tmp_path, keep=1)
    assert not (tmp_path / "checkpoints" / "step_1" / "COMMITTED").exists()
    assert (tmp_path / "checkpoints" / "step_1" / "model.safetensors").exists()


@pytest.mark.parametrize("when", ["save_weights", "save_state"])
def test_a_full_disk_says_what_to_do_and_loses_nothing(base, tmp_path, monkeypatch, when):
    policy = load(base)
    checkpoints.save(tmp_path, 1, policy, STATE)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(policy, when, full)
    with pytest.raises(
        CheckpointError, match=r"step_2: the disk is full.*trainer.keep_checkpoints.*--resume"
    ):
        checkpoints.save(tmp_path, 2, policy, STATE)
    assert names(tmp_path) == ["step_1"]
    found = checkpoints.latest(tmp_path)
    assert found is not None
    checkpoints.load(found, load(base))


def fill_up(run_dir: Path, base: Path) -> None:
    """Save with ever more to spare on the disk, until it is enough; run by a process of its own."""
    policy = load(base)
    policy.update(make_rows(2), version=0)
    path = checkpoints.save(run_dir, 1, policy, STATE)
    needed = sum(one.stat().st_size for one in path.iterdir())
    ballast = run_dir / "ballast"
    found = []
    for spare in range(0, 2 * needed, needed // 12):
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(run_dir).free - spare)
        why = ""
        try:
            checkpoints.save(run_dir, 2, policy, STATE)
        except CheckpointError as error:
            why = str(error)
        assert names(run_dir) == (["step_1"] if why else ["step_1", "step_2"])
        assert not why or "step_2: the disk is full" in why
        found.append("full" if why else "saved")
        shutil.rmtree(run_dir / "checkpoints" / "step_2", ignore_errors=True)
        ballast.unlink()
        newest = checkpoints.latest(run_dir)
        assert newest is not None
        checkpoints.load(newest, policy)
    assert found == sorted(found)
    print(found.count("full"), found.count("saved"))


@pytest.mark.slow
def test_a_disk_that_really_fills_up_at_any_moment(base, tmp_path):
    """On a small file system of its own, mounted in a namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = shutil.which("unshare")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if unshare is None or subprocess.run([unshare, "-Urm", *mount], capture_output=True).returncode:
        pytest.skip("needs a user namespace that may mount a file system")
    script = f"from {__name__} import *; fill_up(Path({str(disk)!r}), Path({str(base)!r}))"
    done = subprocess.run(
        [unshare, "-Urm", "sh", "-ec", '"$@"; exec "$PYTHON" -c "$SCRIPT"', "sh", *mount],
        env={**os.environ, "PYTHON": sys.executable, "SCRIPT": script},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    full, saved = map(int, done.stdout.split())
    assert full >= 10
    assert saved >= 5


def test_a_directory_that_cannot_be_written_says_so(base, tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="step_1 cannot be written"):
        checkpoints.save(tmp_path, 1, load(base), STATE)


def test_a_broken_marker_is_an_error_and_not_a_silent_step_back(base, tmp_path):
    path = checkpoints.save(tmp_path, 1, load(base), STATE)
    (path / "COMMITTED").write_text("{")
    with pytest.raises(CheckpointError, match=r"COMMITTED is damaged \(it cannot be read.*remove"):
        checkpoints.latest(tmp_path)


@pytest.mark.parametrize("name", ["trainer.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused(base, tmp_path, name):
    path = checkpoints.save(tmp_path, 1, load(base), STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    damaged = path / name
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="step_1"):
        checkpoints.load(found, load(base))
    damaged.unlink()
    with pytest.raises(CheckpointError, match="step_1"):
        checkpoints.load(found, load(base))


def test_every_file_of_a_checkpoint_is_held_against_its_checksum(base, tmp_path):
    path = checkpoints.save(tmp_path, 1, load(base), STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    found.verify()
    assert found.files is not None
    assert {"trainer.pt", "model.safetensors", "config.json", "tokenizer.json"} <= found.files.keys()
    for name in found.files:
        whole = (path / name).read_bytes()
        flipped = bytearray(whole)
        flipped[len(flipped) // 2] ^= 16
        (path / name).write_bytes(flipped)
        with pytest.raises(
            CheckpointError, match=rf"step_1/{name} is damaged \(its checksum.*; remove .*step_1 "
        ):
            found.verify()
        (path / name).unlink()
        with pytest.raises(CheckpointError, match=rf"step_1/{name} is damaged \(No such file"):
            found.verify()
        (path / name).write_bytes(whole)
    found.verify()


def test_a_digit_changed_in_the_marker_is_found(base, tmp_path):
    path = checkpoints.save(tmp_path, 1, load(base), STATE)
    text = (path / "COMMITTED").read_text()
    (path / "COMMITTED").write_text(text.replace('"ledger": 1234', '"ledger": 1235'))
    with pytest.raises(CheckpointError, match=r"COMMITTED is damaged \(its checksum"):
        checkpoints.latest(tmp_path)


def test_a_marker_of_an_earlier_version_has_no_checksums(base, tmp_path):
    path = checkpoints.save(tmp_path, 1, load(base), STATE)
    (path / "COMMITTED").write_text(json.dumps({**STATE, "step": 1}))
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.files is None
    found.verify()
    checkpoints.save(tmp_path, 1, load(base), STATE)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.files is not None
