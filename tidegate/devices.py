"""The device that a setting names, where torch has it."""

from __future__ import annotations

import torch

from tidegate.errors import StartError


def find_device(setting: str, name: str) -> torch.device:
    """Raises StartError, which names the setting, where torch can put nothing there."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        why = str(error).strip().partition("\n")[0]
        here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise StartError(f"{setting} = {name!r}: {why}. This machine has: {', '.join(here)}") from None
