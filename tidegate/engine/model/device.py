"""Copies arrays from the host to the device without waiting for the device.

Copies to a GPU use page-locked memory: a copy from other memory waits for all work queued on the GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on the device; on a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
