"""A child without root's rights over processes and files, where the tests themselves run as root."""

from __future__ import annotations

import ctypes
import os

PR_CAPBSET_DROP = 24
CAPABILITIES = 41


def unprivileged() -> None:
    """For `preexec_fn`: what is executed then has the rights of an ordinary user, though the same user id."""
    if os.geteuid() == 0:
        for capability in range(CAPABILITIES):
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
