"""Settings for all tests that reduce their run time."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.certificates import trust_one_authority

# On shared cores, waiting for a core may take longer than the example itself.
settings.register_profile("shared_cores", deadline=None)
settings.load_profile("shared_cores")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    # Several hundred processes import the package, which must not be compiled for each of them.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 - closed after the tests
    config.add_cleanup(file.close)
    trust_one_authority(file)


def pytest_collection_finish() -> None:
    # Imports create a million long-lived objects, which the collector would scan in vain.
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(autouse=True)
def _own_umask() -> Iterator[None]:
    """Commands that a test runs in this process shield it, which changes the umask of later tests."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
