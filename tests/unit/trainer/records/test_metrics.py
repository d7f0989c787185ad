import json
import math
import time

import numpy as np
import pytest
import torch

from tidegate.errors import TidegateError
from tidegate.trainer.records.metrics import MetricsLog, read_metrics


def test_a_step_is_one_flat_line(tmp_path):
    before = time.time()
    with MetricsLog(tmp_path / "run") as log:
        log.append(
            {"step": 1, "version": 4, "reward/mean": np.float32(0.5), "loss": torch.tensor(2.0), "ok": True}
        )
        # Readable at once, while the log stays open.
        (line,) = read_metrics(tmp_path / "run")
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 1, "version": 4, "reward/mean": 0.5, "loss": 2.0, "ok": True}


def test_what_json_cannot_say_is_null(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"step": 1, "version": 0, "nan": math.nan, "inf": -math.inf, "numpy": np.float64("nan")})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["nan"], line["inf"], line["numpy"]) == (None, None, None)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, object()])
def test_a_nested_metric_is_refused_by_name(tmp_path, value):
    with MetricsLog(tmp_path) as log, pytest.raises(TypeError, match="'bad/one'"):
        log.append({"step": 1, "version": 0, "bad/one": value})
    assert read_metrics(tmp_path) == []


def test_a_line_says_which_step_and_version(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"step": 1, "version": 2, "time": 3.5})
        for line in ({"version": 1}, {"step": 1}):
            with pytest.raises(KeyError):
                log.append(line)
    assert read_metrics(tmp_path) == [{"step": 1, "version": 2, "time": 3.5}]


def test_a_torn_last_line_is_left_out_and_removed_on_opening(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"step": 1, "version": 0})
        log.append({"step": 2, "version": 1})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:-cut])
        steps = [line["step"] for line in read_metrics(tmp_path)]
        assert steps == [1, 2][: whole[:-cut].count(b"\n")]
        with MetricsLog(tmp_path) as log:
            log.append({"step": 9, "version": 1})
        assert [line["step"] for line in read_metrics(tmp_path)] == [*steps, 9]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(TidegateError, match="line 2"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"stap": 1}\n')
    with pytest.raises(TidegateError, match="it has no step"):
        read_metrics(tmp_path)


def test_no_file_is_no_lines(tmp_path):
    assert read_metrics(tmp_path / "nowhere") == []


def test_abandoned_steps_are_dropped_on_resume(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 8):
            log.append({"step": step, "version": step, "loss": step / 3, "lost": math.nan})
    with MetricsLog(tmp_path) as log:
        assert log.truncate_after(5) == 2
        log.append({"step": 6, "version": 8, "loss": 0.5})
        added = log.add_to_last({"eval/reward": 1.0, "lost": math.nan})
    lines = read_metrics(tmp_path)
    assert (lines[-1]["loss"], lines[-1]["eval/reward"], lines[-1]["lost"]) == (0.5, 1.0, None)
    assert added["eval/reward"] == 1.0
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 5, 8]
    assert lines[2]["loss"] == 1.0
    assert lines[2]["lost"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]
