"""Settings of glibc's allocator, for the whole process. With another C library they change nothing."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Parameters of `mallopt`."""
_MAPPED_BYTES = 2**20


def return_freed_memory() -> None:
    """Makes glibc return blocks of 1 MB and more to the system when they are freed.

    By default glibc takes them from a heap for each thread once it has freed one, and keeps up to 64 MB of
    each heap: after requests with large bodies, hundreds of megabytes.
    """
    _set(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def share_one_heap() -> None:
    """Makes all threads allocate from one heap.

    By default each thread has a heap of its own, and keeps the memory that it frees. Optimiser steps run in
    changing threads: with six of them a step's activations were kept six times, 18 GB instead of 8.
    """
    _set(_M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(parameter, value)
