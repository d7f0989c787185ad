"""Code that holds the interpreter's lock, as a long regular expression does, but uses no processor time."""

from __future__ import annotations

import ctypes


def hold_interpreter_lock() -> None:
    """Never returns: locks a mutex that is locked, by a call that keeps the interpreter's lock."""
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
