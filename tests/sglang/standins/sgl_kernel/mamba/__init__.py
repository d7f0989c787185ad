"""Stands in for SGLang's compiled kernels where there is no GPU: SGLang imports their names at start, and
calls none of them with the torch-native attention backend. One that is called says so."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU, and this is its stand-in")

    return absent
