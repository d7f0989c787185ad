"""A decode step copies from the device once, and its operations have a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integration.engine.engine_drive import Driver
from tests.tiny import make_tiny_model
from tidegate.engine.model.model import load_model
from tidegate.engine.options import EngineOptions

WAITS = ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Methods that read a tensor's values on the host."""
OPERATIONS_OF_A_LAYER, OTHER_OPERATIONS = 48, 52
"""Largest numbers of operations of a decode step, other than views; on a GPU the host launches each."""
KINDS: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 5}, {"presence_penalty": 0.5}]
STEPS = 6


class Waits:
    """Counts the calls that wait for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in WAITS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method: Any) -> Any:
        def counted(tensor: torch.Tensor) -> Any:
            self.count += 1
            return method(tensor)

        return counted


class Operations(TorchDispatchMode):
    """Counts operations other than views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def started(directory: Path, layers: int, kind: dict[str, Any]) -> tuple[Driver, Callable[[], None]]:
    """A driver with three requests that decode, and what runs STEPS steps of it."""
    make_tiny_model(directory, layers=layers)
    driver = Driver(load_model(EngineOptions(directory, max_slots=8, max_context=256)))
    prompts = ([5, 3, 8], [7, 1, 2, 9], [4, 6, 2, 8, 3])
    requests = [
        driver.submit(prompt, sampling_seed=i, max_new_tokens=30, **kind) for i, prompt in enumerate(prompts)
    ]
    driver.until(lambda: len(requests[0].output_ids) == 3)
    return driver, lambda: driver.until(lambda: len(requests[0].output_ids) == 3 + STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_a_step_are_within_their_budget(tmp_path: Path, kind: dict[str, Any]) -> None:
    counts = []
    for layers in (2, 3):
        _, steps = started(tmp_path / str(layers), layers, kind)
        with Operations() as operations:
            steps()
        counts.append(operations.count / STEPS)
    of_a_layer = counts[1] - counts[0]
    assert 0 < of_a_layer <= OPERATIONS_OF_A_LAYER
    assert 0 < counts[0] - 2 * of_a_layer <= OTHER_OPERATIONS


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_the_device_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    driver, steps = started(tmp_path, 2, kind)
    with monkeypatch.context() as patch:
        waits = Waits(patch)
        before = driver.scheduler.counters.steps
        steps()
    assert waits.count == driver.scheduler.counters.steps - before == STEPS
