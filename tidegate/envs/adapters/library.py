"""Access to libraries that may be absent, and the seeds of their tasks."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

from tidegate.errors import ConfigError
from tidegate.program import advise_extra

Result = TypeVar("Result")


def require(module: str, extra: str | None = None) -> ModuleType:
    """Imports a library's module.

    Args:
        module: Dotted name of the module.
        extra: Tidegate's extra that installs the library; None: docs/adapters.md describes the installation.

    Raises:
        ConfigError: The library is not installed, or one of its own imports fails.
    """
    library = module.split(".")[0]
    try:
        importlib.import_module(library)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == library:
            how = advise_extra(extra) if extra else "docs/adapters.md describes how to"
            raise ConfigError(f"the library {library!r} is not installed; {how}") from None
        raise ConfigError(f"the library {library!r} cannot be imported: {error}") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the library {library!r} cannot be imported: {cause}") from error


def task_seed(seed: int, split: str, *place: int) -> int:
    """Returns the seed of a task or of some, below 2³¹: odd ones are for training, even ones held out."""
    digest = hashlib.blake2b(f"{seed}/{split}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**30 * 2 + (split == "train")


def run_apart(work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
    """Runs a coroutine in an event loop and a thread of its own, for callers that are synchronous.

    Raises:
        TimeoutError: It took longer than `timeout_s`.
    """

    async def limited() -> Result:
        async with asyncio.timeout(timeout_s):
            return await work

    with ThreadPoolExecutor(1, "tidegate-adapter") as pool:
        return pool.submit(asyncio.run, limited()).result()
