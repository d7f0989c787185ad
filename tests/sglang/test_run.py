"""The demo's agent learns with a SGLang server that the run started, in spite of killed processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import held, metrics, training
from tests.engine_runs import (
    adapters_of_two_policies_continue_after_a_kill,
    demo_learns_though_its_engine_is_killed,
    engine_ends_with_a_killed_run_which_goes_on,
    through,
)
from tests.sglang.conftest import ARGUMENTS

pytestmark = pytest.mark.timeout(1800)


def test_the_demo_learns_and_a_killed_server_comes_back(tmp_path: Path, python: str) -> None:
    demo_learns_though_its_engine_is_killed(tmp_path / "run", through("sglang", python, ARGUMENTS))


def test_the_server_exits_with_a_killed_run_which_can_be_resumed(tmp_path: Path, python: str) -> None:
    engine_ends_with_a_killed_run_which_goes_on(tmp_path / "run", through("sglang", python, ARGUMENTS))


def test_weights_are_sent_to_the_server_and_to_the_one_that_takes_its_place(
    tmp_path: Path, python: str
) -> None:
    settings = through("sglang", python, ARGUMENTS)
    with training(
        tmp_path / "run", *settings, "--trainer.publish_transport=broadcast", "--trainer.steps=10"
    ) as run:
        run.until_step(3, timeout=300)
        os.kill(run.owned("engine"), signal.SIGKILL)
        run.until_said("the engine is back at version", timeout=180)
        assert run.wait(timeout=600) == 0, run.output()[-3000:]
    calls = (run.run_dir / "logs" / "engine.log").read_text()
    assert calls.count('"POST /init_weights_update_group HTTP/1.1" 200') == 2
    assert calls.count('"POST /update_weights_from_distributed HTTP/1.1" 200') >= 8, (
        "all but the killed one's"
    )
    errors = [line["logprob_max_error"] for line in metrics(tmp_path / "run")[1:]]
    assert max(error for error in errors if error is not None) < 1e-3
    held(tmp_path / "run")


def test_adapters_of_two_policies_continue_after_a_kill(tmp_path: Path, python: str) -> None:
    settings = through("sglang", python, [*ARGUMENTS, "--lora-backend", "torch_native"])
    adapters_of_two_policies_continue_after_a_kill(tmp_path / "run", settings, 1e-3)
