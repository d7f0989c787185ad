"""OpenTelemetry spans of episodes and steps, at a collector that reads the real protocol."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests import REPO
from tests.fakes import staged
from tests.integration.gateway.test_journal import ASK, TASK, model
from tests.otlp import collecting
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.config import load_settings
from tidegate.errors import StartError
from tidegate.gateway.groups.spans import EpisodeSpans
from tidegate.service import tracing
from tidegate.trainer.loggers.opentelemetry import StepSpans
from tidegate.types import Outcome, ToolCall

__all__ = ["model"]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


async def test_an_episode_is_a_span_with_its_turns(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        async with staged(model, tracing=True) as stage:
            for reported in (Outcome.COMPLETED, Outcome.AGENT_ERROR):
                access = await stage.client.open_session(task=TASK)
                llm = await stage.llm(access)
                reply = await llm.chat.completions.create(model="m", messages=ASK)
                await llm.chat.completions.create(model="m", messages=[*ASK, reply.choices[0].message, *ASK])
                error = "lost" if reported is Outcome.AGENT_ERROR else None
                await stage.client.finish(access.session_id, outcome=reported, error=error, reward=1.0)
            trajectory = stage.gateway.session(access.session_id).trajectory
            assert trajectory is not None
        first, second = sorted(collector.named("episode"), key=lambda span: span.start)
    assert (first.service, first.error, second.error) == ("tidegate-gateway", None, "lost")
    assert second.attributes["tidegate.session_id"] == trajectory.session_id
    assert [one.attributes["tidegate.outcome"] for one in (first, second)] == ["completed", "agent_error"]
    turns = sorted(collector.children(second), key=lambda span: span.attributes["tidegate.turn"])
    assert [span.name for span in turns] == ["chat", "chat"]
    for span, turn in zip(turns, trajectory.turns, strict=True):
        assert span.attributes["gen_ai.usage.input_tokens"] == len(trajectory.prompt_ids(turn))
        assert span.attributes["gen_ai.usage.output_tokens"] == len(turn.output_ids)
        assert second.start - 0.1 <= span.start <= span.end <= second.end + 0.1


async def test_an_episode_ends_as_without_traces_if_the_collector_is_away(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")  # no server listens on the discard port
    monkeypatch.setattr(tracing, "EXPORT_S", 1)
    async with staged(model, tracing=True) as stage:
        access = await stage.client.open_session(task=TASK)
        await (await stage.llm(access)).chat.completions.create(model="m", messages=ASK)
        ended = await stage.client.finish(access.session_id, outcome=Outcome.COMPLETED, reward=1.0)
        assert ended.outcome is Outcome.COMPLETED


async def test_tool_calls_and_steps_are_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        await asyncio.to_thread(_send, tmp_path)
    [episode] = collector.named("episode")
    good, bad = collector.named("execute_tool look"), collector.named("execute_tool cancel")
    assert {span.parent for span in (*good, *bad)} == {episode.id}
    assert (good[0].error, bad[0].error) == (None, "no such order")
    assert good[0].end - good[0].start == pytest.approx(2.0, abs=1e-3)
    [step] = collector.named("step")
    assert (step.service, step.attributes["tidegate.step"]) == ("tidegate-trainer", 3)
    assert (step.attributes["reward/mean"], step.start, step.end) == (0.5, 90.0, 100.0)
    parts = [(span.name, span.start, span.end) for span in collector.children(step)]
    assert parts == [("wait_for_batch", 90.0, 94.0), ("update", 94.0, 97.0), ("publish", 97.0, 99.0)]


def _send(directory: Path) -> None:
    trajectory = make_trajectory([make_turn(0, None, [1, 2], [3])])
    trajectory.tool_calls = [
        ToolCall("look", {}, "found", False, 0, 1000.0, 2.0),
        ToolCall("cancel", {}, "no such order", True, 0, 1003.0, 1.0),
    ]
    episodes = EpisodeSpans(tracing.Spans("tidegate-gateway"))
    episodes.add(trajectory)
    episodes.close()
    config = REPO / "examples" / "demo" / "config.toml"
    steps = StepSpans(load_settings(config, [f"--run.dir={directory}"]), 0)
    steps.step({"step": 0, "time": 5.0, "eval/reward": 0.1})
    times = {"time/step": 10.0, "time/wait_for_batch": 4.0, "time/update": 3.0, "time/publish": 2.0}
    steps.step({"step": 3, "time": 100.0, "reward/mean": 0.5, **times})
    steps.close()


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_traces_without_their_packages_are_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *arguments: Any) -> Any:
        return None if name == missing else found(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(StartError, match=rf"gateway\.tracing needs {missing}, .*extra 'opentelemetry'"):
        tracing.check_tracing("gateway.tracing")
