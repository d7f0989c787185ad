"""Stands in for pinned memory where there is no GPU: ordinary memory. SGLang's LoRA layers ask for it on a
CPU, too, for which torch has no allocator. Imported at the interpreter's start (by a .pth)."""

import functools
from collections.abc import Callable

import torch


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return make(*arguments, **options)

    return made


if not torch.cuda.is_available():
    for name in ("tensor", "arange", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]
