"""A scheduler of four slots over a decoder that records its calls."""

from __future__ import annotations

import pytest

from tests.remembering import Remembering
from tidegate.engine.scheduling.scheduler import Scheduler


@pytest.fixture
def decoder() -> Remembering:
    return Remembering()


@pytest.fixture
def scheduler(decoder: Remembering) -> Scheduler:
    return Scheduler(decoder, max_slots=4, version="0", deliver=lambda _: None)
