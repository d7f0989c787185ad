"""From the host's arrays to the device that computes, without waiting for it.

To a GPU they go through page-locked memory: a copy out of other memory waits for all that the GPU has
still to do.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device; on a CPU the tensor shares its memory."""
    return _staged(array, device).to(device, non_blocking=True)


def refill(target: Tensor, array: np.ndarray) -> None:
    """Copy an array of the same shape and type into a tensor."""
    target.copy_(_staged(array, target.device), non_blocking=True)


def _staged(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
