"""The example configurations for GPUs: they fit in 80 GB, and both sides compute in one type."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import REPO
from tidegate.config import load_settings
from tidegate.plan.memory import memory_plan
from tidegate.plan.shape import read_shape
from tidegate.trainer.processes.gpus import engine_gpus

GPU_BYTES = 80e9
PYTORCH_BYTES = 0.5e9
"""Memory of a process on a GPU besides its tensors."""
CONFIGS = [
    path for path in sorted((REPO / "examples").glob("*/*.toml")) if 'device = "cuda"' in path.read_text()
]


def test_there_are_configurations_for_gpus() -> None:
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_configuration_fits_and_has_one_type(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    settings = load_settings(path, [])
    sizes: Counter[str] = Counter()
    for item in memory_plan(settings, read_shape(settings.model.path)):
        sizes[item.device] += item.size
    on_gpus = {device: size for device, size in sizes.items() if device != "cpu"}
    assert on_gpus
    assert all(size + 2 * PYTORCH_BYTES < GPU_BYTES for size in on_gpus.values()), on_gpus
    assert settings.trainer.pass_dtype == settings.engine.weights_dtype == "bfloat16"
    if "cluster" not in path.stem:
        engines = engine_gpus(settings, 1).engines[""]
        assert len(engines) == (0 if settings.engine.urls else settings.engine.count)
