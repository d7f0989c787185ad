"""Child processes without root's rights over processes and files, for tests that run as root."""

from __future__ import annotations

import ctypes
import os

PR_CAPBSET_DROP = 24
CAPABILITIES = 41


def unprivileged() -> None:
    """For `preexec_fn`: gives the child the rights of an ordinary user, with the same user id."""
    if os.geteuid() == 0:
        for capability in range(CAPABILITIES):
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
