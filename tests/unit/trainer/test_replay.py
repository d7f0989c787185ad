"""A replay that is not possible is refused before anything is loaded."""

import json
from pathlib import Path

import pytest

from tidegate.config import Settings
from tidegate.errors import TidegateError
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.replay import Replay


def test_a_run_of_several_ranks_asks_for_one(tmp_path: Path) -> None:
    settings = Settings.model_validate({"model": {"path": "m"}, "trainer": {"ranks": 2}})
    with pytest.raises(TidegateError, match=r"trained on 2 ranks.*--trainer\.ranks 1"):
        Replay(tmp_path, settings).start()


def killed_run(run_dir: Path) -> Replay:
    """The files of a run that was killed in step 3, after its episodes were written."""
    (run_dir / "trajectories").mkdir()
    with Ledger(run_dir / "ledger.jsonl") as ledger, open(run_dir / "metrics.jsonl", "w") as metrics:
        for step in (1, 2, 3):
            (run_dir / "trajectories" / f"step_{step:06d}.jsonl").write_text("")
            ledger.record(entry("group", "issued", id=f"g{step}"))
            ledger.record(
                entry("group", "ended", id=f"g{step}", state="stepped", step=step, version=step - 1)
            )
            if step < 3:
                metrics.write(json.dumps({"step": step}) + "\n")
    return Replay(run_dir, Settings.model_validate({"model": {"path": "m"}}))


def test_a_run_that_was_killed_in_a_step_is_replayed_up_to_it(tmp_path: Path) -> None:
    replay = killed_run(tmp_path)
    assert replay.steps() == range(1, 3)
    assert Replay(tmp_path, replay.settings, 1, 9).steps() == range(2, 3)


@pytest.mark.parametrize(("first", "last"), [(2, None), (0, 0), (5, None), (1, 1)])
def test_a_replay_without_steps_is_refused(tmp_path: Path, first: int, last: int | None) -> None:
    settings = killed_run(tmp_path).settings
    with pytest.raises(TidegateError, match=rf"no step to take after {first}.*recorded up to 2"):
        Replay(tmp_path, settings, first, last).steps()
