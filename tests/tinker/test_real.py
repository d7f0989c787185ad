"""The backend at a real skyrl-tx service: its first step is ours, and the demo learns though it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from examples.tinker.demo import BASE, ROOT, SkyRL
from tests import tinker_conversation as conversation
from tests.e2e.runs import held, metrics, training
from tests.unit.trainer.learning_fixtures import make_row
from tidegate.config import Settings
from tidegate.tinker.policy import TinkerPolicy
from tidegate.tinker.service import NO_KEY, connect, read_snapshot, sdk
from tidegate.trainer.policy.policy import Policy

pytestmark = pytest.mark.timeout(1800)
RATE = 1e-3
EPS = 1.0
"""Adam's ε, with which a first step is nearly proportional to the gradient: it shows its scale, and rounding
changes no sign."""


def settings_of(service: SkyRL, backend: str) -> Settings:
    tinker = {"base_model": str(service.base), "base_url": service.url, "reduction": "mean"}
    of_backend: dict[str, dict[str, Any]] = {
        "tinker": {"engine": {"kind": "tinker"}, "trainer": {"backend": "tinker", "tinker": tinker}},
        # Its clipping is off, so that it is the service's importance sampling.
        "own": {"trainer": {"loss": {"name": "dapo", "clip_low": 0.99, "clip_high": 1e9, "dual_clip": 1e9}}},
    }
    whole = {"model": {"path": BASE}, **of_backend[backend]}
    whole["trainer"] |= {"learning_rate": RATE, "lora": {"rank": 8}, "max_grad_norm": 1e9}
    return Settings.model_validate(whole)


def adapter(service: SkyRL, directory: Path) -> dict[str, torch.Tensor]:
    """The matrices of a snapshot, under the names that ours have."""
    path, _ = read_snapshot(directory)
    assert path is not None
    run, name = path.removeprefix("tinker://").split("/")
    file = service.place / "checkpoints" / run / "sampler_weights" / f"{name}.tar.gz"
    with tarfile.open(file) as archive:
        member = next(one for one in archive.getnames() if one.endswith("adapter_model.safetensors"))
        content = archive.extractfile(member)
        assert content is not None
        tensors = load(content.read())
    return {
        key.removeprefix("base_model.model.")
        .replace("lora_A.weight", "lora_A.default.weight")
        .replace("lora_B.weight", "lora_B.default.weight"): value
        for key, value in tensors.items()
    }


def test_loss_and_parameters_after_the_first_step_are_ours(
    service: SkyRL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.tinker.policy.EPS", EPS)
    theirs = TinkerPolicy(settings_of(service, "tinker").trainer, BASE, 1, NO_KEY)
    before = adapter(service, theirs.save_weights(tmp_path / "weights" / "v0"))
    ours = Policy.load(BASE, settings_of(service, "own").trainer)
    trained = {name: value for name, value in ours.model.named_parameters() if value.requires_grad}
    assert trained.keys() == before.keys()
    for group in ours._optimizer.param_groups:
        group["eps"] = EPS
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(before[name])
    rng = np.random.default_rng(0)
    rows = [make_row(rng, group=f"g{number}") for number in range(8)]
    for row in rows:
        row.temperature[:] = 1.0
    loss = ours.update(rows, 0)["loss"]
    theirs.backward(rows, 0)
    assert theirs.optimizer_step()["loss"] == pytest.approx(loss, rel=1e-3)
    after = adapter(service, theirs.save_weights(tmp_path / "weights" / "v1"))
    own = torch.cat([(value.detach() - before[name]).flatten() for name, value in trained.items()])
    other = torch.cat([(after[name] - before[name]).flatten() for name in trained])
    assert float(own.norm()) > 0
    assert float((own - other).norm() / own.norm()) < 1e-3


def test_calls_are_answered_as_in_the_recording(service: SkyRL) -> None:
    """Records the conversation with `TIDEGATE_TINKER_RECORD=1`."""
    if service.package != "tx":
        pytest.skip("the recording is that of skyrl-tx")
    settings = settings_of(service, "tinker").trainer.tinker
    exchanges = conversation.hold(
        sdk(), lambda: connect(settings, NO_KEY, once_s=10.0), asyncio.run, str(service.base), service.kill,
        service.start,
    )  # fmt: skip
    if os.environ.get("TIDEGATE_TINKER_RECORD"):
        versions = {"service": "skyrl-tx 0.3.0", "sdk": sdk().__version__}
        text = json.dumps({**versions, "exchanges": exchanges}, indent=1)
        conversation.RECORDING.write_text(f"{text}\n")
    assert exchanges == conversation.recorded()


def test_the_demo_learns_though_service_trainer_and_gateway_are_killed(
    service: SkyRL, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"config": ROOT / "examples/tinker/config.toml", "small": ()}
    at_service = (
        f"--trainer.tinker.base_model={service.base}", f"--trainer.tinker.base_url={service.url}",
    )  # fmt: skip
    run_dir = tmp_path / "run"
    with training(run_dir, *at_service, **options) as run:
        run.until_step(3, timeout=900)
        service.kill()
        service.start()
        run.until_step(8, timeout=900)
        run.kill()
    with training(run_dir, *at_service, "--resume", **options) as run:
        run.until(lambda: metrics(run_dir)[-1]["step"] >= 13, timeout=900)
        os.kill(run.owned("gateway"), signal.SIGKILL)
        assert run.wait(timeout=1500) == 0, run.output()[-3000:]
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(41))
    assert lines[-1]["eval/reward"] >= lines[0]["eval/reward"] + 0.3
    audit = held(run_dir)
    assert audit.oldest_staleness is not None
    assert audit.oldest_staleness <= 2
    print(f"held out {lines[0]['eval/reward']:.3f} -> {lines[-1]['eval/reward']:.3f}, {audit}")
