"""The return of the policy to an earlier checkpoint, and the end of a run, if cancelled or if they fail."""

from __future__ import annotations

import asyncio
import errno
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from tests.waiting import eventually
from tidegate.config import Settings
from tidegate.errors import CheckpointError, GatewayError, LedgerError
from tidegate.trainer import run_publisher as publisher_module
from tidegate.trainer.batch.credit import RunningMeans
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpointing import RunCheckpoints
from tidegate.trainer.end import RunResult
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.publish.version_requests import VersionRequest, read_request, write_request
from tidegate.trainer.start import Start
from tidegate.trainer.training import Training


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a roll-back reads of a run whose version of step 3 is live."""
    checkpoint = checkpoints.Checkpoint(tmp_path, 3, {})
    monkeypatch.setattr(checkpoints, "committed", lambda run_dir: {3: tmp_path})
    monkeypatch.setattr(checkpoints, "read", lambda path: checkpoint)
    loop, live = SimpleNamespace(committable=True), SimpleNamespace(live_step=3)
    return SimpleNamespace(
        dir=tmp_path, loop=loop, promotion=live, checkpoints=run_checkpoints(tmp_path),
    )  # fmt: skip


def run_checkpoints(run_dir: Path, **given: Any) -> RunCheckpoints:
    named: Any = {
        "run_dir": run_dir, "start": SimpleNamespace(weights=None), "policy": object(),
        "admission": MagicMock(), "ledger": MagicMock(), "means": RunningMeans(), "publisher": MagicMock(),
        "promotion": None, "supervisor": TaskSupervisor(), "keep": 2,
    }  # fmt: skip
    return RunCheckpoints(**named | given)


async def test_a_cancelled_return_to_a_checkpoint_ends_with_its_loading_and_commits_nothing(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release, loaded = threading.Event(), threading.Event(), threading.Event()

    def load(checkpoint: checkpoints.Checkpoint, policy: object) -> None:
        begun.set()
        release.wait(30)
        loaded.set()

    monkeypatch.setattr(checkpoints, "load", load)
    returning = asyncio.create_task(Training._restore(run))
    await eventually(begun.is_set)
    returning.cancel()
    done, _ = await asyncio.wait([returning], timeout=0.1)
    assert not done, "the thread still writes the policy"
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await returning
    assert loaded.is_set()
    assert not run.loop.committable


async def test_a_return_to_a_checkpoint_commits_only_if_all_of_it_was_loaded(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(checkpoint: checkpoints.Checkpoint, policy: object) -> None:
        raise CheckpointError("a file is damaged")

    monkeypatch.setattr(checkpoints, "load", fail)
    with pytest.raises(CheckpointError):
        await Training._restore(run)
    assert not run.loop.committable
    monkeypatch.setattr(checkpoints, "load", lambda checkpoint, policy: None)
    assert (await Training._restore(run)).step == 3
    assert run.loop.committable


@pytest.mark.parametrize("step", [5, 6])
async def test_a_roll_back_whose_publish_fails_does_not_commit_a_checkpoint_with_the_weights_before_it(
    run: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Step 5 has a checkpoint, whose weights are those that are rolled back; step 6 has none."""
    (run.dir / "old").mkdir()
    saved = {3: run.dir, 5: run.dir / "old"}
    monkeypatch.setattr(checkpoints, "committed", lambda run_dir: saved)
    monkeypatch.setattr(checkpoints, "load", lambda checkpoint, policy: None)
    monkeypatch.setattr(checkpoints, "read", lambda path: checkpoints.Checkpoint(path, 3, {"version": 3}))
    write_request(run.dir, VersionRequest("rollback", 3))
    run.loop.step, run.publisher, run.admission = step, AsyncMock(), MagicMock()
    run._restore = partial(Training._restore, run)
    run.publisher.publish.side_effect = GatewayError("no engine")
    with pytest.raises(GatewayError):
        await Training._roll_back(run)
    assert run.loop.committable == (step == 6), "else the marker is of weights that are rolled back"


FULL = "the disk is full"


@pytest.fixture
def saving(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a checkpoint reads of a run with 4 stepped groups, whose writing waits for `release`.

    It fails with `error`, if that is set.
    """
    run.release, run.error, run.pruned = threading.Event(), None, []
    run.admission = MagicMock(epoch=1, version=3)
    run.admission.progress.return_value = {"cursor": 0, "tickets": []}
    run.admission.stepped.return_value = (4, 16)
    run.ledger = SimpleNamespace(position=9, checksum=1, durable=AsyncMock())
    run.checkpoints = run_checkpoints(run.dir, admission=run.admission, ledger=run.ledger)

    def write() -> None:
        assert run.release.wait(30)
        if run.error is not None:
            raise run.error

    monkeypatch.setattr(checkpoints, "begin", lambda *_: write)
    monkeypatch.setattr(checkpoints, "prune", lambda *arguments: run.pruned.append(arguments))
    return run


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(saving: Any) -> None:
    await saving.checkpoints.write(3, background=True)
    saving.admission.stepped.return_value = (8, 32)  # another step
    following = asyncio.create_task(saving.checkpoints.write(4))
    await asyncio.wait([following], timeout=0.1)
    saving.admission.commit.assert_not_called()
    assert saving.ledger.durable.await_count == 1
    saving.admission.stepped.return_value = (4, 16)
    saving.release.set()
    await following
    assert [call.args for call in saving.admission.commit.call_args_list] == [((4, 16),)] * 2
    assert len(saving.pruned) == 2


async def test_a_checkpoint_that_fails_in_the_background_ends_the_run(saving: Any) -> None:
    saving.error = CheckpointError(FULL)
    saving.release.set()

    async def train() -> None:
        await saving.checkpoints.write(3, background=True)
        await asyncio.sleep(30)

    with pytest.raises(CheckpointError, match=FULL):
        await saving.checkpoints.supervisor.run(train())
    saving.admission.commit.assert_not_called()
    await saving.checkpoints.written()  # the end of the run waits, and writes its own


async def test_a_roll_back_to_a_checkpoint_that_fails_is_not_forgotten(saving: Any) -> None:
    saving.error, saving.loop.step, saving.observer = CheckpointError(FULL), 5, MagicMock()
    await saving.checkpoints.write(5, background=True)
    write_request(saving.dir, request := VersionRequest("rollback", 5))
    saving.release.set()
    with pytest.raises(CheckpointError, match=FULL):
        await Training._roll_back(saving)
    assert read_request(saving.dir) == request, "a resumed run finds it"


@pytest.fixture
def ending(run: Any) -> Any:
    """What the end of a run reads that has taken all its steps, and whose last checkpoint fails."""
    run.entries, run.notes, run.result = [], [], RunResult("failed", None, 0)
    run.ledger = SimpleNamespace(record=run.entries.append)
    run.observer = SimpleNamespace(note=run.notes.append)
    run.evaluations = run.rollout = AsyncMock()
    run.admission, run.loop.step, run.loop.solved = SimpleNamespace(version=3), 3, None
    run.settings = SimpleNamespace(trainer=SimpleNamespace(steps=3, until=None))
    run._by_clients = False
    write = AsyncMock(side_effect=CheckpointError(FULL))
    run.checkpoints, run.supervisor = SimpleNamespace(write=write, written=AsyncMock()), TaskSupervisor()
    run._open = AsyncMock()
    run._train = AsyncMock()
    for name in ("_end", "_how_ended", "_record_end", "_end_after"):
        if method := getattr(Training, name, None):
            setattr(run, name, partial(method, run))
    return run


async def test_a_run_whose_last_checkpoint_fails_has_failed(ending: Any) -> None:
    with pytest.raises(CheckpointError, match=FULL):
        await Training.run(ending)
    assert (ending.entries[-1]["status"], ending.entries[-1]["why"]) == ("failed", FULL)
    assert ending.result.status == "failed"


async def test_a_run_that_is_cancelled_and_whose_last_checkpoint_fails_has_failed(ending: Any) -> None:
    ending._open.side_effect = asyncio.CancelledError
    with pytest.raises(CheckpointError, match=FULL):
        await Training.run(ending)
    assert (ending.entries[-1]["status"], ending.entries[-1]["why"]) == ("failed", FULL)


async def test_a_checkpoint_that_fails_after_another_failure_does_not_hide_it(ending: Any) -> None:
    ending._open.side_effect = GatewayError("it is away")
    with pytest.raises(GatewayError, match="it is away"):
        await Training.run(ending)
    assert (ending.entries[-1]["status"], ending.entries[-1]["why"]) == ("failed", "it is away")
    assert [note for note in ending.notes if FULL in note]


async def test_groups_that_cannot_be_ended_after_a_failed_entry_do_not_hide_it(ending: Any) -> None:
    """Admission has ended an attempt whose entry could not be written."""
    ending._open.side_effect = LedgerError("cannot record g1.0.1")
    ending.rollout.stop.side_effect = KeyError("g1.0.1")
    with pytest.raises(LedgerError, match="cannot record"):
        await Training.run(ending)


@pytest.mark.parametrize("named", [True, False])
async def test_a_full_disk_is_the_reason_in_the_ledger_as_in_the_console(ending: Any, named: bool) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    if named:
        error.filename = "/run/trajectories/step_000001.jsonl.part"
    ending._open.side_effect = error
    with pytest.raises(OSError, match="No space left"):
        await Training.run(ending)
    where = error.filename or ending.dir
    remedy = "free some space, then continue with --resume"
    assert ending.entries[-1]["why"] == f"{where}: No space left on device; {remedy}"


def test_weights_are_sent_and_written_in_the_engines_number_type(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: MagicMock() for name in ("WeightBroadcaster", "VersionWriter")}
    for name, double in made.items():
        monkeypatch.setattr(publisher_module, name, double)
    sections = {"engine": {"dtype": "bfloat16"}, "trainer": {"publish_transport": "broadcast"}}
    settings = Settings.model_validate({"model": {"path": "m"}, **sections})
    names = (
        "policy",
        "engines",
        "provider",
        "ledger",
        "cancel_stale",
        "in_outage",
        "note",
        "stack",
    )
    start = Start(Path("m"))
    publisher_module.make_publisher(settings=settings, start=start, **{name: MagicMock() for name in names})
    assert made["WeightBroadcaster"].call_args.args[0].keywords == {
        "as_files": "bfloat16",
        "on_device": False,
    }
    assert made["VersionWriter"].call_args.kwargs["dtype"] == "bfloat16"
