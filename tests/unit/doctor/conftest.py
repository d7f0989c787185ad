"""The renderer of the bundled model."""

from __future__ import annotations

import pytest

from tidegate.gateway.rendering.renderer import Renderer
from tidegate.scaffold.init import TINY_BASE


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer.load(TINY_BASE)
