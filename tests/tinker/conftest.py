"""A real service on the CPU, from an environment that `make test-tinker` makes: skyrl-tx, or skyrl."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tinker.demo import SkyRL

PYTHON = os.environ.get("TIDEGATE_TINKER_PYTHON", "")
PACKAGE = os.environ.get("TIDEGATE_TINKER_PACKAGE", "tx")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.tinker)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyRL]:
    if not PYTHON:
        pytest.skip("needs skyrl-tx in an environment of its own: make test-tinker")
    one = SkyRL(tmp_path_factory.mktemp("skyrl"), PYTHON, PACKAGE)
    one.start()
    yield one
    one.kill()
