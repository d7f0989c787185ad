"""A real skyrl-tx service on this machine's CPU, and the tiny demo trained at it (`make demo-tinker`).

    python examples/tinker/demo.py --python PYTHON [settings of `tidegate train`]

`PYTHON` is the interpreter of an environment with requirements/tinker.txt. The service's files are in
build/skyrl-tx; what it compiles is kept there, so that a second run is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = ROOT / "examples/tiny_base/model"
START_S = 300.0


class SkyRL:
    """The service with the demo's base model; its database and checkpoints outlive a kill."""

    def __init__(self, place: Path, python: str, package: str = "tx") -> None:
        """`package` has the service: `tx` in skyrl-tx 0.3, `skyrl` in its successor skyrl 0.4."""
        self.place = place
        self.package = package
        self.base = place / "base"
        shutil.copytree(BASE, self.base, dirs_exist_ok=True)
        self._make_older("config.json", rope_theta=10000.0, torch_dtype="float32")
        self._make_older("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        # It starts its worker as uv started it; uv need not be here.
        self._uv = place / "bin" / "uv"
        self._uv.parent.mkdir(exist_ok=True)
        self._uv.write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\n{python} "$@"\n')
        self._uv.chmod(0o755)
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
                [str(self._uv), "run", "-m", f"{self.package}.tinker.api",
                 "--base-model", str(self.base), "--backend", "jax", "--backend-config", json.dumps(backend),
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
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"skyrl-tx does not answer; the end of {self.place}/log:\n{self._log()}")
            time.sleep(0.2)  # polling another process

    def _log(self) -> str:
        return (self.place / "log").read_text()[-3000:]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=2):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """Kills the service and its worker."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def main() -> int:
    """Starts the service, trains at it, and ends it."""
    parser = argparse.ArgumentParser(description="Train the tiny demo at a skyrl-tx service.")
    parser.add_argument("--python", required=True, help="interpreter of an environment with skyrl-tx")
    arguments, settings = parser.parse_known_args()
    place = ROOT / "build/skyrl-tx/service"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    service = SkyRL(place, arguments.python)
    print("starting skyrl-tx, which takes up to a minute ...", flush=True)
    service.start()
    train = [
        sys.executable, "-m", "tidegate", "train", str(ROOT / "examples/tinker/config.toml"), "--fresh",
        f"--trainer.tinker.base_model={service.base}", f"--trainer.tinker.base_url={service.url}",
    ]  # fmt: skip
    try:
        return subprocess.run([*train, *settings]).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        service.kill()


if __name__ == "__main__":
    sys.exit(main())
