"""A decode step copies from the device once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.engine.engine_drive import Driver
from tests.tiny import make_tiny_model
from tidegate.engine.model.model import load_model
from tidegate.engine.options import EngineOptions

WAITS = ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Methods that read a tensor's values on the host."""


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


@pytest.mark.parametrize("kind", [{}, {"temperature": 0}, {"top_k": 5}, {"presence_penalty": 0.5}])
def test_a_step_waits_for_the_device_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    make_tiny_model(tmp_path)
    driver = Driver(load_model(EngineOptions(tmp_path, max_slots=8, max_context=256)))
    prompts = ([5, 3, 8], [7, 1, 2, 9], [4, 6, 2, 8, 3])
    requests = [
        driver.submit(prompt, sampling_seed=i, max_new_tokens=30, **kind) for i, prompt in enumerate(prompts)
    ]
    driver.until(lambda: len(requests[0].output_ids) == 3)
    with monkeypatch.context() as patch:
        waits = Waits(patch)
        before = driver.scheduler.counters.steps
        driver.until(lambda: len(requests[0].output_ids) == 9)
    assert waits.count == driver.scheduler.counters.steps - before == 6
