"""The stand-in as the SDK of processes with this folder on their PYTHONPATH; FAKE_TINKER names its states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.fake_tinker import *  # noqa: F403
from tests.fake_tinker import Files, Service


def ServiceClient(**_: Any) -> Service:
    return Service(states=Files(Path(os.environ["FAKE_TINKER"])))
