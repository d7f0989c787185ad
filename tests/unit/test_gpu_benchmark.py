"""The GPU benchmark: its parts do not affect each other, and each runs on a CPU in a tiny shape."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu

BENCHMARKS = Path(gpu.__file__).parent
UNLIKE = """
import os, sys, threading
print('{"what": "first", "value": 1}', flush=True)
print("a library's line")
if sys.argv[1] == "fails":
    raise RuntimeError("planted")
if sys.argv[1] == "aborts":
    os.abort()
if sys.argv[1] == "hangs":
    threading.Event().wait()
"""
PLANTED = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu_parts
def broken(place):
    gpu_parts.say("first")
    raise RuntimeError("planted")
if __name__ == "__main__":
    gpu_parts.PARTS["compiled"] = broken  # `steps` with a setting, which takes a minute
    gpu_parts.main(sys.argv[1:])
"""


def run(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, *options: str
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit status, and each part's rows in order, of the benchmark with this script as its parts."""
    path = tmp_path / "parts.py"
    path.write_text(script)
    monkeypatch.setattr(gpu, "SCRIPT", path)
    status = gpu.main([*options, "--keep", str(tmp_path)])
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        rows.setdefault(row.pop("part"), []).append(row)
    return status, rows


def test_parts_that_fail_abort_or_hang_do_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PARTS", {"fails": 60, "aborts": 60, "hangs": 5, "ends": 60})
    status, rows = run(UNLIKE, tmp_path, monkeypatch, capsys, "--minutes", "1")
    assert status == 1
    assert all(first == {"what": "first", "value": 1} for first, _ in rows.values())
    ended = {part: (last["ended"], last.get("error")) for part, (_, last) in rows.items()}
    assert list(ended) == list(gpu.PARTS)
    assert ended["fails"] == ("exit status 1", "RuntimeError: planted")
    assert ended["aborts"][0] == "exit status -6"
    assert ended["hangs"][0].startswith("killed after its limit of"), "60 s less two parts, × 5 ÷ 65"
    assert ended["ends"] == ("done", None)


def test_the_limits_of_all_parts_are_within_nine_minutes() -> None:
    assert sum(gpu.PARTS.values()) <= 540


def test_no_part_starts_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(UNLIKE, tmp_path, monkeypatch, capsys, "--minutes", "0.1")
    assert status == 1
    assert list(rows) == list(gpu.PARTS)
    assert all(row["ended"].startswith("not started") for (row,) in rows.values())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_part_measures_on_a_cpu_although_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "cpu", "--tiny", "--minutes", "60")
    status, rows = run(PLANTED, tmp_path, monkeypatch, capsys, *options)
    assert status == 1
    assert list(rows) == list(gpu.PARTS)
    ended = {part: (of_part[-1]["ended"], of_part[-1].get("error")) for part, of_part in rows.items()}
    assert ended.pop("compiled") == ("exit status 1", "RuntimeError: planted")
    assert set(ended.values()) == {("done", None)}, ended
    for part, of_part in rows.items():
        assert len(of_part) > 1, part
        for row in of_part[:-1]:
            assert "error" not in row, (part, row)
            figures = [value for value in row.values() if isinstance(value, float)]
            assert all(map(math.isfinite, figures)), (part, row)
