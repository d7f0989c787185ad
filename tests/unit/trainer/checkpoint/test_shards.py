"""Shards of one rank; `tests/integration/trainer/test_ranks.py` has several."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tidegate.trainer.checkpoint import shards


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_tensors_are_copied_before_they_are_written(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on a CPU, too (pytorch issue 144657)."""
    changed, original = threading.Event(), FileSystemWriter.write_data

    def write(self: Any, *arguments: Any) -> Any:
        assert changed.wait(30)
        return original(self, *arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    tensor = torch.ones(3, 2)
    wait = shards.begin_save({"0.exp_avg": tensor}, tmp_path, group)
    tensor.zero_()
    changed.set()
    wait()
    for readers in (None, group):
        loaded = {"0.exp_avg": torch.empty(3, 2)}
        shards.load(loaded, tmp_path, readers)
        assert loaded["0.exp_avg"].equal(torch.ones(3, 2))
    with pytest.raises(OSError, match=r"rank 0: ValueError: .*[Ss]ize mismatch"):
        shards.load({"0.exp_avg": torch.empty(2, 2)}, tmp_path, None)
    with pytest.raises(OSError, match=r"rank 0: RuntimeError: Missing key"):
        shards.load({"1.exp_avg": torch.empty(3, 2)}, tmp_path, None)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_full_disk_keeps_its_number(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    """torch hides a failed write's error, and an error that is sent to rank 0 loses its context."""

    def write(*_: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            if hidden:
                raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904
            raise

    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    wait = shards.begin_save({"0.exp_avg": torch.ones(2)}, tmp_path, group)
    with pytest.raises(OSError, match="trainer rank 0: No space left on device") as found:
        wait()
    assert found.value.errno == errno.ENOSPC


def test_a_file_that_rank_0_does_not_see_is_no_checkpoint(group: dist.ProcessGroup, tmp_path: Path) -> None:
    wait = shards.begin_save({"0.exp_avg": torch.ones(2)}, tmp_path, group)
    wait()
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(OSError, match="all ranks must share the run's directory"):
        wait()
