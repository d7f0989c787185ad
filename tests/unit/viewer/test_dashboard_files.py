"""Growing files are read incrementally; of a trajectory file a single record is read."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.viewer import run_files
from tidegate.viewer.dashboard import tail as follow
from tidegate.viewer.dashboard.records import PART_LINES, NotFound, Records
from tidegate.viewer.dashboard.tail import Tail


def line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


class Counted(io.FileIO):
    """A file that knows how many bytes were read of it."""

    read_so_far = 0

    def read(self, size: int = -1, /) -> bytes:
        found = super().read(size) or b""
        Counted.read_so_far += len(found)
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.read_so_far = 0
    plain = builtins.open

    def opened(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        return Counted(path) if mode == "rb" else plain(path, mode, *more, **named)

    monkeypatch.setattr(builtins, "open", opened)
    return Counted


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert not tail.restarted()
    assert list(tail.objects()) == []
    path.write_text(line(step=1) + '{"step"')
    assert list(tail.objects()) == [{"step": 1}]
    assert list(tail.objects()) == []
    with path.open("a") as file:
        file.write(": 2}\nnot json\n[3]\n\n")
    assert not tail.restarted()
    assert list(tail.objects()) == [{"step": 2}]
    assert tail.broken == 2


def test_lines_longer_than_a_block_and_odd_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BLOCK", 7)
    path = tmp_path / "x.jsonl"
    path.write_text(line(text="é" * 40) + '{"value": NaN}\n' + '{"text": "\\ud800"}\n' + "\n")
    found = list(Tail(path).objects())
    assert found[0] == {"text": "é" * 40}
    assert found[1]["value"] != found[1]["value"]
    assert found[2] == {"text": "\ud800"}


def test_what_was_read_is_not_read_again(tmp_path: Path, counted: type[Counted]) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(line(seq=number) for number in range(20_000)))
    tail = Tail(path)
    assert len(list(tail.objects())) == 20_000
    whole = counted.read_so_far
    assert whole >= path.stat().st_size
    with path.open("a") as file:
        file.write(line(seq=20_000))
    assert not tail.restarted()
    assert [one["seq"] for one in tail.objects()] == [20_000]
    assert counted.read_so_far - whole < 100


@pytest.mark.parametrize("again", ["short", "same length", "longer"])
def test_a_file_written_anew_is_read_anew(tmp_path: Path, again: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(step=1) + line(step=2))
    tail = Tail(path)
    assert len(list(tail.objects())) == 2
    # In place: the inode stays the same.
    new = {"short": [1], "same length": [1, 3], "longer": [1, 3, 4, 5]}[again]
    path.write_text("".join(line(step=step) for step in new))
    assert tail.restarted()
    assert [one["step"] for one in tail.objects()] == new
    assert not tail.restarted()


def record(number: int, **more: Any) -> dict[str, Any]:
    turn = {"index": 0, "parent": None, "output_ids": [1] * number, "version_spans": [[number, 0, number]]}
    return {"state": "stepped", "group_id": f"g{number // 2}", "slot": number % 2, "task_id": "t",
            "outcome": "completed", "reward": 1.0, "turns": [turn], **more}  # fmt: skip


def write(run_dir: Path, name: str, records: list[dict[str, Any]], mode: str = "w") -> Path:
    path = run_dir / "trajectories" / name
    path.parent.mkdir(exist_ok=True)
    with path.open(mode) as file:
        file.writelines(line(**one) for one in records)
    return path


def test_one_record_is_read_by_its_offset(tmp_path: Path, counted: type[Counted]) -> None:
    path = write(tmp_path, "step_000001.jsonl", [record(number) for number in range(500)])
    records = Records(tmp_path)
    assert len(records.file("step", 1).summaries) == 500
    indexed = counted.read_so_far
    one, found = records.read("step", 1, 321)
    assert (one.tokens, one.group, one.slot, one.oldest) == (321, "g160", 1, 321)
    assert found["turns"][0]["output_ids"] == [1] * 321
    assert counted.read_so_far - indexed == one.length < path.stat().st_size / 100
    records.read("step", 1, 321)
    assert counted.read_so_far - indexed == one.length


def test_a_file_that_grows_is_indexed_on(tmp_path: Path, counted: type[Counted]) -> None:
    write(tmp_path, "failed.jsonl", [record(number) for number in range(200)])
    records = Records(tmp_path)
    assert len(records.file("failed", 1).summaries) == 200
    indexed = counted.read_so_far
    path = write(tmp_path, "failed.jsonl", [record(7)], "a")
    with path.open("a") as file:
        file.write('{"half": ')
    assert len(records.file("failed", 1).summaries) == 201
    assert counted.read_so_far - indexed < 2000
    assert records.read("failed", 0, 200)[0].tokens == 7


def test_each_part_is_indexed_alone_and_numbers_its_own_lines(tmp_path: Path, counted: type[Counted]) -> None:
    write(tmp_path, "failed.jsonl", [record(number) for number in range(200)])
    records = Records(tmp_path)
    assert records.numbers("failed") == [1]
    second = write(tmp_path, "failed.2.jsonl", [record(7), record(8)])
    assert records.numbers("failed") == [1, 2]
    assert [one.line for one in records.file("failed", 2).summaries] == [PART_LINES, PART_LINES + 1]
    assert counted.read_so_far == second.stat().st_size, "the first part is not read"
    one, found = records.read("failed", 0, PART_LINES + 1)
    assert (one.tokens, one.line, found["turns"][0]["output_ids"]) == (8, PART_LINES + 1, [1] * 8)
    assert records.read("failed", 0, 199)[0].tokens == 199
    with pytest.raises(NotFound, match=r"has 2 episodes; there is no episode 1000000002"):
        records.read("failed", 0, PART_LINES + 2)
    with pytest.raises(NotFound, match=r"failed.3.jsonl does not exist"):
        records.read("failed", 0, 2 * PART_LINES)
    erased = write(tmp_path, "failed.jsonl.part", [record(3)])
    erased.replace(tmp_path / "trajectories" / "failed.jsonl")
    assert [one.tokens for one in records.file("failed", 1).summaries] == [3]
    assert records.read("failed", 0, PART_LINES)[0].tokens == 7, "its number does not change"


def test_a_step_that_is_taken_again_is_indexed_again(tmp_path: Path) -> None:
    path = write(tmp_path, "step_000001.jsonl", [record(1), record(2)])
    records = Records(tmp_path)
    assert [one.tokens for one in records.file("step", 1).summaries] == [1, 2]
    assert records.read("step", 1, 0)[0].tokens == 1
    part = write(tmp_path, "step_000001.jsonl.part", [record(5), record(6), record(7)])
    part.replace(path)
    assert [one.tokens for one in records.file("step", 1).summaries] == [5, 6, 7]
    assert len(records.read("step", 1, 0)[1]["turns"][0]["output_ids"]) == 5


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, "step_000001.jsonl", [record(1)])
    records = Records(tmp_path)
    with pytest.raises(NotFound, match="step 2"):
        records.file("step", 2)
    with pytest.raises(NotFound, match="1 episodes; there is no episode 1"):
        records.read("step", 1, 1)
    with pytest.raises(NotFound, match="'g9'"):
        records.file("step", 1).group("g9")


def test_damaged_records_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"turns": "none", "reward": "high", "slot": "a", "group_id": 7, "metadata": 3},
        {"turns": [1, {"version_spans": [[1, 2], "x", [1, "a", 2]], "output_ids": 5}]},
    ]
    write(tmp_path, "step_000001.jsonl", odd)
    found = Records(tmp_path).file("step", 1).summaries
    assert [one.turns for one in found] == [0, 0, 1]
    assert (found[1].reward, found[1].slot, found[1].group) == (None, None, "7")


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.viewer.dashboard.records.MOST_SUMMARIES", 25)
    records = Records(tmp_path)
    for step in range(1, 6):
        write(tmp_path, f"step_{step:06d}.jsonl", [record(number) for number in range(10)])
        records.file("step", step)
        assert records._indexed() <= 25
    assert records.numbers("step") == [1, 2, 3, 4, 5]
    assert len(records.file("step", 1).summaries) == 10


def test_a_line_that_is_nested_too_deeply_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + '}\n{"step": 2}\n')
    assert list(Tail(path).objects()) == [{"step": 1}, {"step": 2}]
    assert list(run_files.objects(path)) == [{"step": 1}, {"step": 2}]
