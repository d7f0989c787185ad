"""Resolves the device that a setting names, and measures its free memory."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tidegate.errors import StartError

_KINDS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that people have; torch's own message lists all that it was ever built for."""


def find_device(setting: str, name: str) -> torch.device:
    """Returns the device; raises StartError, which names the setting, if torch cannot use it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch is built without CUDA
        why = "there is no such kind of device" if name.partition(":")[0] not in _KINDS else _cause(error)
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise StartError(
            f"{setting} = {name!r}: {why}; this machine has {', '.join(devices)}: set {setting} to "
            f"{devices[:2][-1]!r}"
        ) from None


def _cause(error: Exception) -> str:
    return re.split(r"\n|\. ", str(error).strip())[0]


def count_gpus() -> int:
    """Returns the number of GPUs that torch finds."""
    return torch.cuda.device_count()


def free_memory(device: str) -> int | None:
    """Returns the bytes that a process can still allocate on a device; None if this is unknown."""
    if not device.startswith("cpu"):
        return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else None
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        return None
    bounds = [int(found[1]) * 1024] if found else []
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        folder = Path("/sys/fs/cgroup")
        try:
            bounds.append(int((folder / most).read_text()) - int((folder / used).read_text()))
        except (OSError, ValueError):  # not in such a group, or without a limit: "max"
            continue
    return min(bounds, default=None)
