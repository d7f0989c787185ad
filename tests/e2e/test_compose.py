"""The commands of compose.yaml as processes of this machine: engine, gateway and trainer train together."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import REPO
from tests.deployment import composed
from tests.e2e.runs import ENVIRONMENT, held, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextlib.contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A container's command, without the container."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=REPO, stdout=output, stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, "TIDEGATE_ADMIN_KEY": "secret"},
        )  # fmt: skip
    try:
        yield running
    finally:
        running.terminate()
        running.wait(30)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def until_healthy(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    """What the health check does."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert running.poll() is None, log.read_text()
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health", timeout=4)
            return
        time.sleep(0.1)  # asking another process
    pytest.fail(log.read_text())


def test_the_services_of_compose_train_together(tmp_path: Path) -> None:
    engine, gateway = free_port(), free_port()
    places = {
        "0.0.0.0": "127.0.0.1", "http://engine:30000": f"http://127.0.0.1:{engine}", "=30000": f"={engine}",
        "http://gateway:8000": f"http://127.0.0.1:{gateway}", "=/model": "=examples/tiny_base/model",
        "/journal": str(tmp_path / "journal"),
    }  # fmt: skip

    def here(name: str) -> list[str]:
        words = list(composed()[name].command)
        if name == "gateway":
            words[words.index("--gateway.port") + 1] = str(gateway)
        for there, place in places.items():
            words = [word.replace(there, place) if word != "--journal" else word for word in words]
        return words

    logs = {name: tmp_path / f"{name}.log" for name in ("engine", "gateway", "trainer")}
    small = [
        f"--run.dir={tmp_path / 'runs'}", "--run.live_view=false", "--trainer.steps=2",
        "--trainer.groups_per_batch=4", "--trainer.group_size=4", "--eval.tasks=8",
        "--agent.max_concurrency=16",
    ]  # fmt: skip
    with (
        process(here("engine"), logs["engine"]) as engine_process,
        process(here("gateway"), logs["gateway"]) as gateway_process,
    ):
        until_healthy(f"http://127.0.0.1:{engine}", engine_process, logs["engine"])
        until_healthy(f"http://127.0.0.1:{gateway}", gateway_process, logs["gateway"])
        with process([*here("trainer"), *small], logs["trainer"]) as trainer:
            assert trainer.wait(200) == 0, logs["trainer"].read_text()
        assert (gateway_process.poll(), engine_process.poll()) == (None, None)
    assert len(metrics(tmp_path / "runs" / "demo")) >= 2
    assert held(tmp_path / "runs" / "demo").steps == 2
    assert os.listdir(tmp_path / "journal")
