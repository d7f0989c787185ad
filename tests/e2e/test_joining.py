"""Engines that join and leave a run during publishes: no episode is lost, tokens of all are trained on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO, TrainProcess, ends, held, metrics, training
from tests.fakes import FakeEngine, Fault
from tests.waiting import announced
from tidegate.gateway.client import ADMIN_KEY
from tidegate.service.api_key import ENGINE_KEY

pytestmark = pytest.mark.slow
KEY = "of-the-test"
BASE = REPO / "examples" / "tiny_base" / "model"


def address(run: TrainProcess, name: str) -> str:
    url: str = json.loads((run.run_dir / "logs" / f"{name}.address").read_text())["url"]
    return url


def asked(url: str, method: str = "GET", body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


@contextlib.contextmanager
def joining(run: TrainProcess, directory: Path) -> Iterator[str]:
    """Starts an external engine with an unrelated version label; yields its URL."""
    announce = directory / "joined.address"
    command = [
        sys.executable, "-m", "tidegate", "engine", "--model.path", str(BASE), "--weight-version", "777",
        "--engine.max_slots=128", "--engine.max_context=512", "--port", "0", "--announce", str(announce),
        "--join", address(run, "gateway"),
    ]  # fmt: skip
    with open(directory / "joined.log", "wb") as log:
        engine = subprocess.Popen(command, cwd=REPO, env={**ENVIRONMENT, ADMIN_KEY: KEY}, stderr=log)
    try:
        yield announced(announce, engine)
    finally:
        engine.terminate()
        engine.wait(30)


def sampled(url: str) -> int:
    return int(asked(f"{url}/model_info")["tokens_sampled"])


def test_one_engine_joins_and_another_leaves_and_dies_and_nothing_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = ["--trainer.steps=1000", "--eval.tasks=4", f"--gateway.admin_key={KEY}"]
    with training(run_dir, *settings, environment={**ENVIRONMENT, ENGINE_KEY: KEY}) as run:
        run.until_step(1)
        own, engines = address(run, "engine"), address(run, "gateway") + "/engines"
        with joining(run, tmp_path) as new:
            run.until_said("joined, at version")
            run.until(lambda: sampled(new) > 500)
            assert sampled(own) > 500
            asked(engines, "DELETE", {"url": own})
            run.until_said("left")
            left = metrics(run_dir)[-1]
            run.until_step(left["step"] + 4)
            os.kill(run.owned("engine"), signal.SIGKILL)
            run.until_said("the engine is back")
            assert [row["url"] for row in asked(engines)["engines"]] == [new], "who left does not come back"
            asked(engines, "POST", {"url": own})
            run.until_said("joined, at version", times=2)
            again = sampled(own)
        run.until(lambda: new not in str(asked(engines)))
        run.until(lambda: sampled(own) > again)
        run.interrupt()
        assert run.wait() == 130, run.output()
    audit = held(run_dir)
    assert audit.groups["trained"] == audit.steps * 4
    assert audit.attempts["failed"] == 0, "agents saw a slow answer, not an error"
    assert audit.oldest_staleness is not None
    assert audit.oldest_staleness <= 2
    lines = metrics(run_dir)[1:]
    assert max(line["logprob_max_error"] or 0 for line in lines) < 1e-3, "the weights were those published"
    while_alone = [line for line in lines if left["version"] + 2 < line["version"] <= left["version"] + 4]
    assert while_alone, "no step of these has a token of the one that left"


async def test_an_engine_whose_tokens_could_not_be_trained_on_ends_the_run_before_its_first_step(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(lambda _: "", faults=deque([Fault("no_versions")] * 3))
    await engine.start()
    try:
        with training(tmp_path / "run", f'--engine.urls=["{engine.url}"]') as run:
            assert await asyncio.to_thread(run.wait, 120) == 1
    finally:
        await engine.stop()
    said = " ".join(run.output().split())
    assert f"engine {engine.url}: a sampled token lacks the version of the weights behind it" in said
    assert [line["step"] for line in metrics(tmp_path / "run")] == []
    assert len(engine.requests) == 1
    ((status, why),) = ends(tmp_path / "run")
    assert (status, "a sampled token lacks the version" in (why or "")) == ("failed", True)
    held(tmp_path / "run")
