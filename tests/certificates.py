"""The file of trusted authorities that the tests' HTTP clients read.

Each new client reads the certificates of all authorities, which takes 30 ms of processor time; the tests call
local servers only, so one certificate is enough for them.
"""

from __future__ import annotations

import os
from typing import IO

import certifi

_FILE, _BEFORE = "SSL_CERT_FILE", "TESTS_SSL_CERT_FILE"


def trust_one_authority(file: IO[str]) -> None:
    """Makes this process and its children read `file`, to which one certificate is written."""
    end = "-----END CERTIFICATE-----\n"
    file.write(certifi.contents().partition(end)[0] + end)
    file.flush()
    os.environ.setdefault(_BEFORE, os.environ.get(_FILE, ""))  # workers of pytest-xdist inherit both
    os.environ[_FILE] = file.name


def trusting_all(environment: dict[str, str]) -> dict[str, str]:
    """Returns an environment with the user's own file, for commands that download."""
    kept = {name: value for name, value in environment.items() if name not in (_FILE, _BEFORE)}
    return {**kept, **({_FILE: before} if (before := environment.get(_BEFORE)) else {})}
