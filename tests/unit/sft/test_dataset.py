"""The data of a fine-tuning: its split by task, its batches, and data that is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_tokenizer import make_model_dir
from tests.unit.viewer.dashboard_run import write_dashboard_run
from tidegate.config import Settings, load_settings
from tidegate.errors import ConfigError
from tidegate.sft.dataset import TuningData, split
from tidegate.sft.demonstration import Demonstration, demonstration
from tidegate.trainer.records.trajectories import step_files


def several(tasks: int, each: int) -> list[Demonstration]:
    """Demonstrations whose first id is the number of their task."""
    mask = np.array([False, True])
    return [
        demonstration(f"t{task}", f"{task}.{number}", [(np.array([task, number], np.int32), mask)])
        for task in range(tasks)
        for number in range(each)
    ]


def tasks_of(rows: list[Any]) -> set[int]:
    return {int(row.ids[0]) for row in rows}


@pytest.mark.parametrize(("share", "held"), [(0.0, 0), (0.001, 1), (0.2, 2), (0.5, 5)])
def test_a_share_of_the_tasks_is_for_validation(share: float, held: int) -> None:
    training, validation = split(several(10, 3), share, seed=0)
    assert len(tasks_of(validation)) == held
    assert not tasks_of(validation) & tasks_of(training)
    assert len(training) + len(validation) == 30
    assert tasks_of(split(several(10, 3), share, seed=0)[1]) == tasks_of(validation)


def test_a_task_without_a_sequence_is_no_part_of_the_share() -> None:
    nothing = [demonstration(f"empty{task}", f"e{task}", []) for task in range(40)]
    training, validation = split([*several(10, 1), *nothing], 0.2, seed=0)
    assert (len(training), len(validation)) == (8, 2)


def test_every_epoch_has_each_sequence_once_in_another_order() -> None:
    training, _ = split(several(10, 1), 0.0, seed=0)
    data = TuningData(training, [], batch_size=4, seed=3)
    assert data.steps_per_epoch == 3
    epochs = [[data.batch(3 * epoch + step) for step in (1, 2, 3)] for epoch in range(2)]
    assert [[len(batch) for batch in batches] for batches in epochs] == [[4, 4, 2]] * 2
    orders = [[int(row.ids[0]) for batch in batches for row in batch] for batches in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(10))
    assert orders[0] != orders[1]
    assert [row.session_id for row in data.batch(5)] == [row.session_id for row in data.batch(5)]
    other = TuningData(training, [], batch_size=4, seed=4)
    assert [int(row.ids[0]) for row in other.batch(1)] != orders[0][:4]


def test_the_digest_depends_on_ids_masks_and_the_split() -> None:
    training, _ = split(several(4, 1), 0.0, seed=0)
    digests = {
        TuningData(training, [], 2, 0).digest,
        TuningData(training[:3], training[3:], 2, 0).digest,
        TuningData(training[::-1], [], 2, 0).digest,
        TuningData(split(several(5, 1), 0.0, seed=0)[0][:4][::2], [], 2, 0).digest,
    }
    assert len(digests) == 4


def settings_of(model: Path, *overrides: str) -> Settings:
    return load_settings(None, [f"--model.path={model}", *overrides])


def test_data_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run").dir
    model = tmp_path / "model"
    with pytest.raises(ConfigError, match=r"nothing to train on: set sft\.episodes or sft\.chats"):
        TuningData.load(settings_of(model))
    with pytest.raises(ConfigError, match=r"0 episodes and chats were selected, with sft\.min_reward = 7"):
        TuningData.load(settings_of(model, f"--sft.episodes={run}", "--sft.min_reward=7"))
    assert len(TuningData.load(settings_of(model, f"--sft.episodes={run}")).training) == 15


def test_episodes_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run").dir
    base = Path("examples/tiny_base/model").absolute()
    with pytest.raises(ConfigError, match=r"was sampled with the tokenizer of .*model, whose token ids mean"):
        TuningData.load(settings_of(base, f"--sft.episodes={run}"))
    (tmp_path / "model").rename(tmp_path / "moved")  # then the ids are compared with the vocabulary
    small = make_model_dir(tmp_path / "small")
    assert TuningData.load(settings_of(small, f"--sft.episodes={run}")).training
    for path in step_files(run).values():
        path.write_text(re.sub(r'"delta_ids":\[\d+', '"delta_ids":[999999', path.read_text()))
    with pytest.raises(ConfigError, match=r"episode .* has the token id 999999, and the tokenizer of"):
        TuningData.load(settings_of(small, f"--sft.episodes={run}"))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["--sft.steps=3", "--sft.epochs=2"], "steps = 3 and epochs = 2 both limit"),
        (["--sft.per_group=1"], "per_group selects recorded episodes, and there are none"),
        (["--sft.episodes=r", "--sft.corrections=true", "--sft.min_reward=0"], "min_reward has no effect"),
        (["--sft.replies=last"], "replies is about chats, and there are none"),
        (["--sft.held_out=true", "--agent.source=remote"], r"sft\.held_out .* needs agent\.source"),
        (["--sft.validation=1"], r"sft\.validation = 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_settings(None, ["--model.path=m", *overrides])
