"""Resolves the device that a setting names."""

from __future__ import annotations

import torch

from tidegate.errors import StartError


def find_device(setting: str, name: str) -> torch.device:
    """Returns the device; raises StartError, which names the setting, if torch cannot use it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch is built without CUDA
        why = str(error).strip().partition("\n")[0]
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise StartError(f"{setting} = {name!r}: {why}. This machine has: {', '.join(devices)}") from None
