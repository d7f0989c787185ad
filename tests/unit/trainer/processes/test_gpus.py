"""The GPUs of a machine: ranks and engines use different ones, or the run is refused before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidegate import devices
from tidegate.config import Settings
from tidegate.errors import ConfigError, StartError
from tidegate.evaluation import attempts
from tidegate.launch import check_model
from tidegate.scaffold.init import TINY_BASE
from tidegate.service.service import Service
from tidegate.settings.policies import PolicySettings
from tidegate.settings.servers import ModelSettings
from tidegate.trainer.processes import gpus
from tidegate.trainer.processes.gpus import engine_gpus
from tidegate.trainer.processes.servers import LocalProcesses
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.types import Sampling

SGLANG = {"kind": "sglang", "python": "/x/python"}
VLLM = {"kind": "vllm", "python": "/x/python"}


def settings(trainer: dict[str, Any], engine: dict[str, Any], **more: Any) -> Settings:
    return Settings.model_validate(
        {
            **more,
            "model": {"path": "m"},
            "env": {"use": "arithmetic"},
            "agent": {"use": "solver"},
            "trainer": {"device": "cuda", **trainer},
            "engine": engine,
        }
    )


@pytest.mark.parametrize(
    ("trainer", "engine", "available", "found"),
    [
        ({"ranks": 4}, {**SGLANG, "count": 4}, 8, [(4,), (5,), (6,), (7,)]),
        ({"ranks": 4}, {**SGLANG, "count": 2, "arguments": ["--tp", "2"]}, 8, [(4, 5), (6, 7)]),
        ({}, {**VLLM, "arguments": ["--tensor-parallel-size=2"]}, 8, [(1, 2)]),
        ({"ranks": 2}, {**SGLANG, "count": 2, "arguments": ["--base-gpu-id=1{index}"]}, 12, [(10,), (11,)]),
        ({"device": "cuda:2"}, {"device": "cuda", "count": 3}, 4, [(0,), (1,), (3,)]),
        ({}, {"device": "cuda:1", "count": 2}, 2, [(1,), (1,)]),
        ({}, SGLANG, 1, [(0,)]),
        ({}, {"device": "cuda", "count": 2}, 1, [(0,), (0,)]),
        ({"device": "cuda:0"}, {"device": "cuda:0"}, 2, [(0,)]),
        ({"device": "cpu"}, {**SGLANG, "arguments": ["--device", "cpu"]}, 2, [()]),
        ({"ranks": 2}, {"device": "cpu"}, 2, [()]),
        ({"ranks": 2}, {"urls": ["http://e:1"]}, 2, []),
        ({}, SGLANG, 0, [()]),
    ],
)
def test_ranks_have_the_first_gpus_and_engines_the_next(
    trainer: dict[str, Any], engine: dict[str, Any], available: int, found: list[tuple[int, ...]]
) -> None:
    assert engine_gpus(settings(trainer, engine), available).engines == {"": found}


@pytest.mark.parametrize(
    ("trainer", "engine", "available", "words"),
    [
        ({"ranks": 4}, {"device": "cpu"}, 2, "trainer.ranks = 4 need a GPU each, and this machine has 2"),
        ({"ranks": 4}, {**SGLANG, "count": 5}, 8, r"need 4 \+ 5 × 1 GPUs, and this machine has 8"),
        ({}, {"device": "cuda", "count": 2}, 2, r"need 1 \+ 2 × 1 GPUs"),
        ({}, {**SGLANG, "arguments": ["--tp", "2"]}, 1, r"need 1 \+ 1 × 2 GPUs"),
        (
            {"ranks": 2},
            {**SGLANG, "count": 2, "arguments": ["--base-gpu-id", "{index}"]},
            8,
            "trainer rank 0",
        ),
        ({}, {"device": "cuda:0"}, 2, "engine.device puts engine 0 on GPU 0, which trainer rank 0 uses"),
        ({}, {**SGLANG, "count": 2, "arguments": ["--base-gpu-id", "1"]}, 4, "use {index}"),
        ({"publish_transport": "broadcast"}, SGLANG, 1, '"broadcast" cannot send weights'),
    ],
)
def test_an_overlap_is_refused_by_name(
    trainer: dict[str, Any], engine: dict[str, Any], available: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_gpus(settings(trainer, engine), available)


ONE = {**SGLANG, "arguments": ["--base-gpu-id", "1"]}


@pytest.mark.parametrize(
    ("engine", "policies", "words"),
    [
        (SGLANG, {"a": {}, "b": {"engine": {**SGLANG, "count": 7}}}, r"and 8 engines need 1 \+ 8 × 1 GPUs"),
        (
            SGLANG,
            {"a": {}, "b": {"engine": {**SGLANG, "count": 3, "arguments": ["--tp", "2"]}}},
            r"and 4 engines need 1 \+ 1 × 1 \+ 3 × 2 GPUs",
        ),
        (
            ONE,
            {"a": {}, "b": {}},
            r"--base-gpu-id in engine.arguments puts engine 0 of policy b on GPU 1, which engine 0 of "
            r"policy a uses .*policies\.NAME\.engine",
        ),
        (
            {"device": "cuda:1"},
            {"a": {}, "b": {"engine": ONE}},
            r"--base-gpu-id in policies\.b\.engine\.arguments puts engine 0 of policy b on GPU 1, which "
            r"engine 0 of policy a uses \(engine\.device\)",
        ),
        (
            {"device": "cuda:1"},
            {"a": {}, "b": {"engine": {"device": "cuda:0"}}},
            r"policies\.b\.engine\.device puts engine 0 of policy b on GPU 0, which trainer rank 0 uses",
        ),
    ],
)
def test_an_overlap_of_several_policies_is_refused_by_name(
    engine: dict[str, Any], policies: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_gpus(settings({}, engine, policies=policies), 7)


def test_engines_of_several_policies_have_different_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    policies: dict[str, Any] = {"a": {}, "b": {"engine": {**VLLM, "arguments": ["-tp", "2"]}}, "c": {}}
    given = settings({}, SGLANG, policies=policies)
    seen = [
        engine.variables["CUDA_VISIBLE_DEVICES"]
        for policy in policies
        for engine in LocalProcesses().engines(given, tmp_path, weights, policy)
    ]
    assert seen == ["1", "2,3", "4"]


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPUs of this machine are counted again, without the driver's folder."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "missing")
    gpus._count_gpus.cache_clear()
    yield
    gpus._count_gpus.cache_clear()


@pytest.mark.usefixtures("counted")
def test_gpus_are_counted_without_the_drivers_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-2)\nGPU 1: NVIDIA H200\n"
    monkeypatch.setattr(gpus, "LIST_GPUS", ("echo", listed))
    assert gpus.visible_gpus() == ["0", "1"]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("command", ["false", "/nowhere/nvidia-smi"])
def test_gpus_that_cannot_be_counted_are_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LIST_GPUS", (command,))
    monkeypatch.setattr(devices, "find_device", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(StartError, match=r"does not list its GPUs .* set CUDA_VISIBLE_DEVICES=0,1$"):
        check_model(settings({}, {"device": "cpu"}), engines=True)


def test_the_processes_see_only_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for kind in (SGLANG, VLLM):
        engines = LocalProcesses().engines(settings({"ranks": 2}, {**kind, "count": 2}), tmp_path, weights)
        assert [engine.variables for engine in engines] == [
            {"CUDA_VISIBLE_DEVICES": "6"},
            {"CUDA_VISIBLE_DEVICES": "7"},
        ]
    chosen = {**SGLANG, "arguments": ["--base-gpu-id", "3"]}
    (engine,) = LocalProcesses().engines(settings({"ranks": 2}, chosen), tmp_path, weights)
    assert engine.variables == {}, "SGLang counts among all that are visible"
    (engine,) = LocalProcesses().engines(settings({"ranks": 2}, {"device": "cuda"}), tmp_path, weights)
    assert "--engine.device=cuda:2" in engine.command()


def test_teachers_have_gpus_after_those_of_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    given = settings({"teacher": {"path": "t"}}, {"device": "cuda"})
    (teacher,) = LocalProcesses().teachers(given, tmp_path).values()
    assert "--engine.device=cuda:2" in teacher.command()


def test_a_fine_tuning_needs_no_gpus_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(devices, "find_device", lambda *_: None)
    monkeypatch.setattr(devices, "free_memory", lambda _: None)
    given = settings({"ranks": 2}, {"device": "cuda"})
    check_model(given.model_copy(update={"model": ModelSettings(path=TINY_BASE)}), engines=False)


async def test_an_evaluation_needs_no_gpus_for_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    started: list[Service] = []

    async def start(given: Settings, *_: object) -> Any:
        started.extend(LocalProcesses().engines(given, tmp_path, weights))
        return SimpleNamespace(gateway=None)

    monkeypatch.setattr(attempts, "start_processes", start)
    given = settings({"ranks": 4}, {"device": "cuda", "count": 2})
    async with attempts.hosted(given, Sampling(), tmp_path, TaskSupervisor(), print):
        assert ["--engine.device=cuda:0" in one.command() for one in started] == [True, False]


async def test_an_evaluation_serves_whole_models_of_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters are made by a trainer."""

    served: list[Settings] = []

    async def start(given: Settings, *_: object) -> Any:
        served.append(given)
        return SimpleNamespace(gateway=None)

    monkeypatch.setattr(attempts, "start_processes", start)
    adapter = {"lora": {"rank": 2, "publish": "adapter"}}
    given = settings(adapter, {}).model_copy(
        update={"policies": {"a": PolicySettings(), "b": PolicySettings.model_validate(adapter)}}
    )
    async with attempts.hosted(given, Sampling(), tmp_path, TaskSupervisor(), print):
        assert served[0].engine_sets == {"a": ["a"], "b": ["b"]}


def weights() -> tuple[Path, int]:
    return Path("model"), 0
