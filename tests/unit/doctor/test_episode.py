"""The check of an episode judges the calls of the environment's tools."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.unit.doctor.common import codes, settings_of
from tidegate.doctor.episode import TrialEpisode, judge_episode
from tidegate.gateway.client import SessionSummary
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.scaffold.init import TINY_BASE
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Outcome, ToolCall, Trajectory

REFUSED = ToolCall(
    "calculator", {}, "there is no tool 'calculator'; the tools are convert", error=True, known=False
)


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        (sys.executable, f"the program's interpreter is {sys.executable}: install the package there, or"),
        ("node", ""),
    ],
)
def test_a_program_that_lacks_a_package_is_told_its_interpreter(program: str, hint: str) -> None:
    raised = f"RuntimeError: {program} exited with status 1: ModuleNotFoundError: No module named 'openai'"
    trajectory = Trajectory("s", "t", "units", "train", Outcome.AGENT_ERROR, [])
    summary = SessionSummary("s", Outcome.AGENT_ERROR, None, {}, None, 0, 0, None, error=raised, seconds=0.1)
    settings = settings_of(agent={"use": "command", "options": {"command": [program, "agent.py"]}})
    episode = TrialEpisode(Outcome.AGENT_ERROR, summary, trajectory, {}, {})
    [finding] = judge_episode(episode, settings, Renderer.load(TINY_BASE))
    assert (finding.code, finding.fix[: len(hint)]) == ("agent_raised", hint), finding
    assert bool(hint) == bool(finding.fix)


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([REFUSED, REFUSED], ["tools_failed"]),
        ([REFUSED, ToolCall("convert", {"value": 3}, "2.74", error=False)], []),
        ([], []),
    ],
)
def test_an_episode_whose_tool_calls_all_failed_is_named(calls: list[ToolCall], found: list[str]) -> None:
    renderer = Renderer.load(TINY_BASE)
    ids = np.array(renderer.encode("41"), np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    turn = Turn(0, None, ids, ids, logprobs, (VersionSpan(0, 0, len(ids)),), "stop", 1.0)
    trajectory = Trajectory(
        "s", "t", "units", "train", Outcome.COMPLETED, [turn], reward=0.0, output="41", tool_calls=calls
    )
    summary = SessionSummary("s", Outcome.COMPLETED, 0.0, {}, None, 1, len(ids), 0, error=None, seconds=0.1)
    findings = judge_episode(TrialEpisode(None, summary, trajectory, {}, {}), settings_of(), renderer)
    assert codes(findings) == found
    if found:
        assert (
            "2 tool calls of your agent failed and none succeeded; calculator: there is no"
            in findings[0].text
        )
