"""A real skyrl-tx service on the CPU, from the environment that `make test-tinker` makes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPO

PYTHON = os.environ.get("TIDEGATE_TINKER_PYTHON", "")
BASE = REPO / "examples/tiny_base/model"
START_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.tinker)


class SkyRL:
    """The service with the demo's base model; its database and checkpoints outlive a kill."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.base = place / "base"
        shutil.copytree(BASE, self.base)
        self._make_older("config.json", rope_theta=10000.0, torch_dtype="float32")
        self._make_older("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        # It starts its worker with uv, which need not be here.
        shim = place / "bin" / "uv"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec {PYTHON} "$@"\n')
        shim.chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def _make_older(self, name: str, **fields: object) -> None:
        """Adds the fields that transformers 4 reads."""
        file = self.base / name
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    def start(self) -> None:
        backend = {"max_lora_rank": 8, "sample_max_num_sequences": 32, "train_micro_batch_size": 32}
        with (self.place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "tx.tinker.api", "--base-model", str(self.base), "--backend", "jax",
                 "--backend-config", json.dumps(backend),
                 "--checkpoints-base", str(self.place / "checkpoints"),
                 "--database-url", f"sqlite:///{self.place}/service.db", "--host", "127.0.0.1",
                 "--port", str(self.port)],
                stdout=log, stderr=log, start_new_session=True,
                env={
                    **os.environ, "PATH": f"{self.place}/bin:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu",
                    "PYTHONPATH": "", "JAX_COMPILATION_CACHE_DIR": str(self.place.parent / "jax"),
                },
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self.place / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the service does not answer"
            time.sleep(0.2)  # polling another process

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=2):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """Kills the service and its worker."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyRL]:
    if not PYTHON:
        pytest.skip("needs skyrl-tx in an environment of its own: make test-tinker")
    one = SkyRL(tmp_path_factory.mktemp("skyrl"))
    one.start()
    yield one
    one.kill()
