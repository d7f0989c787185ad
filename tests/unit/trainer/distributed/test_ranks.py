"""Trainer ranks after an error of rank 0: its message, and no further commands to the ranks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.learning_fixtures import make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import CheckpointError, TrainingError
from tidegate.trainer.distributed import fsdp
from tidegate.trainer.distributed import ranks as module
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.policy.forward import Forward
from tidegate.trainer.policy.ranks import ALLOCATOR, out_of_memory

MEMORY = r"out of memory on cpu: .*; lower trainer\.microbatch_tokens \(it is 99\)"


@dataclass
class Told:
    """A process that keeps what it is told, or is deaf."""

    rank: int = 1
    deaf: bool = False
    messages: list[object] = field(default_factory=list)

    async def start(self) -> None: ...

    def send(self, message: object) -> None:
        if self.deaf:
            raise TimeoutError("trainer rank 1 has read nothing for 600 s")
        self.messages.append(message)

    async def wait_for_exit(self) -> str:
        raise AssertionError

    async def stop(self) -> None: ...


def no_memory(*_: object, **__: object) -> Any:
    """More than any machine has."""
    return torch.empty(1 << 60)


def raises(error: Exception) -> Any:
    def raising(*_: object, **__: object) -> None:
        raise error

    return raising


@pytest.fixture
def settings() -> TrainerSettings:
    return TrainerSettings(ranks=2, microbatch_tokens=99)


@pytest.mark.parametrize(
    ("fault", "seen", "words"),
    [
        (no_memory, TrainingError, MEMORY),
        (raises(MemoryError()), TrainingError, MEMORY.replace(".*", "MemoryError")),
        (raises(torch.OutOfMemoryError("CUDA out of memory")), TrainingError, MEMORY),
        (raises(RuntimeError("gloo")), TrainingError, "ranks lost each other: RuntimeError: gloo"),
        (raises(ConnectionResetError("gone")), TrainingError, "lost each other: ConnectionResetError"),
        (raises(KeyError("x")), KeyError, "rank 0 failed in the middle of a step: KeyError: 'x'"),
    ],
)
def test_after_an_error_of_rank_0_alone_nothing_more_is_asked(
    settings: TrainerSettings, fault: Any, seen: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXIT_REPORT_S", 0)
    other = Told()
    ranks = RankProcesses(settings, [other])
    with pytest.raises(seen), ranks.collective("backward"):
        fault()
    with pytest.raises(TrainingError, match=words), ranks.collective("save_weights"):
        pass
    assert len(other.messages) == 1


@pytest.mark.parametrize("error", [CheckpointError("by all"), OSError(28, "no space")])
def test_after_an_error_in_step_they_go_on(settings: TrainerSettings, error: Exception) -> None:
    other = Told()
    ranks = RankProcesses(settings, [other])
    with pytest.raises(type(error)), ranks.collective("load_weights"):
        raise error
    with ranks.collective("backward"):
        pass
    assert len(other.messages) == 2


def test_a_rank_that_reads_nothing_is_named_and_gets_no_more_commands(settings: TrainerSettings) -> None:
    deaf = Told(deaf=True)
    ranks = RankProcesses(settings, [deaf])
    for _ in range(2):
        with (
            pytest.raises(TrainingError, match="trainer rank 1 has read nothing"),
            ranks.collective("backward"),
        ):
            raise AssertionError
        deaf.deaf = False
    assert deaf.messages == []


async def test_a_process_group_that_cannot_be_left_does_not_block(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_S", 0.05)
    never, where = threading.Event(), list[threading.Thread]()

    def leave() -> None:
        where.append(threading.current_thread())
        never.wait(20)

    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "destroy_process_group", leave)
    async with asyncio.timeout(5):
        await RankProcesses(settings, [Told()]).close()
    never.set()
    assert where != [threading.main_thread()], "the event loop's"


def test_ranks_wait_in_no_collective_while_rank_0_reads(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timeout is for tensors: a large model on a slow disk takes longer."""
    events: list[str] = []
    rank_1_waits, done = threading.Event(), threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            done.set()

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            assert timeout > timedelta(hours=1)
            rank_1_waits.set()
            assert done.wait(60)

    class Rank(fsdp.FSDPRanks):
        def collect(self, value: Any) -> list[Any]:
            events.append(f"collective of rank {self.rank}")
            rank_1_waits.set()
            return [value]

    def read() -> str:
        assert rank_1_waits.wait(60)
        events.append("read")
        return "model"

    def open_rank(number: int) -> Any:
        monkeypatch.setattr(fsdp.dist, "get_rank", lambda: number)
        return Rank(settings, Store())  # type: ignore[arg-type]

    monkeypatch.setattr(fsdp.dist, "get_world_size", lambda: 2)
    ranks = [open_rank(number) for number in range(2)]
    with ThreadPoolExecutor() as threads:
        values = list(threads.map(lambda rank: rank._on_rank_0(read), ranks))
    assert values == ["model", None]
    assert events[0] == "read"


@pytest.mark.parametrize(("variable", "named"), [(None, True), ("PYTORCH_ALLOC_CONF", False)])
def test_a_gpu_without_memory_is_told_of_the_allocators_option(
    variable: str | None, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "expandable_segments:True")
    error = torch.OutOfMemoryError("CUDA out of memory.")
    told = out_of_memory(error, TrainerSettings(device="cuda"))
    assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(told)) == named
    assert "PYTORCH" not in str(out_of_memory(error, TrainerSettings()))


@pytest.mark.parametrize("fault", [no_memory, raises(MemoryError())])
async def test_a_trainer_of_one_rank_says_which_setting_takes_less_memory(
    tmp_path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_model(tmp_path / "base")
    ranks = RankProcesses(TrainerSettings(microbatch_tokens=99), [])
    policy = await ranks.open(base, 0, raises(AssertionError()))
    monkeypatch.setattr(Forward, "__call__", fault)
    with pytest.raises(TrainingError, match=MEMORY):
        policy.backward(make_rows(3), 0)
    monkeypatch.setattr(Forward, "__call__", raises(RuntimeError("another one")))
    with pytest.raises(RuntimeError, match="another one"):
        policy.backward(make_rows(3), 0)
