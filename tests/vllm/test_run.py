"""The demo's agent learns with a vLLM server that the run started, in spite of killed processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_runs import (
    adapters_of_two_policies_continue_after_a_kill,
    demo_learns_though_its_engine_is_killed,
    engine_ends_with_a_killed_run_which_goes_on,
    through,
)
from tests.vllm.conftest import ARGUMENTS

pytestmark = pytest.mark.timeout(1800)
DEMO_ARGUMENTS = [argument.replace("2048", "1024") for argument in ARGUMENTS]
"""The demo's model has 1,024 positions, and vLLM refuses a longer context."""


def test_the_demo_learns_and_a_killed_server_comes_back(tmp_path: Path, python: str) -> None:
    demo_learns_though_its_engine_is_killed(tmp_path / "run", through("vllm", python, DEMO_ARGUMENTS))


def test_the_server_exits_with_a_killed_run_which_can_be_resumed(tmp_path: Path, python: str) -> None:
    engine_ends_with_a_killed_run_which_goes_on(tmp_path / "run", through("vllm", python, DEMO_ARGUMENTS))


def test_adapters_of_two_policies_continue_after_a_kill(tmp_path: Path, python: str) -> None:
    settings = through("vllm", python, DEMO_ARGUMENTS)
    adapters_of_two_policies_continue_after_a_kill(tmp_path / "run", settings, 1e-3)
