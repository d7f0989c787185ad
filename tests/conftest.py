"""For all tests: what spares them time that tests nothing."""

import gc
import os
import tempfile

import certifi
import pytest
from hypothesis import settings

# On shared cores an example may wait for longer than it takes.
settings.register_profile("shared_cores", deadline=None)
settings.load_profile("shared_cores")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    # Every client of HTTP reads the certificates of all authorities when it is made, for 30 ms of the
    # processor; the tests call nobody beyond this machine.
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 - it lives as long as the tests
    config.add_cleanup(file.close)
    end = "-----END CERTIFICATE-----\n"
    file.write(certifi.contents().partition(end)[0] + end)
    file.flush()
    os.environ.setdefault("SSL_CERT_FILE", file.name)


def pytest_collection_finish() -> None:
    # What was imported lives until the end: a million objects, in which the collector finds nothing.
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
