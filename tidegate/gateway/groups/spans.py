"""Traces of episodes: a span per episode, and one in it per turn and tool call."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tidegate.service.tracing import Attributes, Spans
from tidegate.turn import Turn
from tidegate.types import ToolCall, Trajectory


class EpisodeSpans:
    """Sends the spans of episodes that have ended.

    Turns and tool calls follow OpenTelemetry's conventions for generative AI (`gen_ai.…`).
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def add(self, trajectory: Trajectory) -> None:
        """Send the spans of an episode that has just ended."""
        end = time.time()
        episode = self._spans.add(
            "episode", end - trajectory.seconds, end, _episode(trajectory), error=trajectory.error
        )
        # Turns hold only the ids that they add, and the convention wants the size of the whole prompt.
        prompts: dict[int | None, int] = {None: 0}
        for turn in sorted(trajectory.turns, key=lambda turn: turn.index):
            prompt = prompts[turn.parent] + len(turn.delta_ids)
            prompts[turn.index] = prompt + len(turn.output_ids)
            ended = turn.started + turn.seconds
            self._spans.add("chat", turn.started, ended, _turn(turn, prompt), parent=episode)
        for call in trajectory.tool_calls:
            self._spans.add(
                f"execute_tool {call.name}", call.started, call.started + call.seconds, _tool_call(call),
                parent=episode, error=call.result if call.error else None,
            )  # fmt: skip

    def close(self) -> None:
        """Send what remains. Blocks."""
        self._spans.close()


def _episode(trajectory: Trajectory) -> Attributes:
    return _known(
        {
            "tidegate.session_id": trajectory.session_id,
            "tidegate.task_id": trajectory.task_id,
            "tidegate.env": trajectory.env,
            "tidegate.split": trajectory.split,
            "tidegate.outcome": trajectory.outcome.value,
            "tidegate.group_id": trajectory.group_id,
            "tidegate.reward": trajectory.reward,
            "tidegate.turns": len(trajectory.turns),
        }
    )


def _turn(turn: Turn, prompt: int) -> Attributes:
    return _known(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "tidegate",
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": len(turn.output_ids),
            "gen_ai.usage.cache_read.input_tokens": turn.cached_tokens,
            "gen_ai.request.temperature": turn.temperature,
            "tidegate.finish_reason": turn.finish_reason,
            "tidegate.turn": turn.index,
            "tidegate.parent_turn": turn.parent,
            "tidegate.delivered": turn.delivered,
            "tidegate.exempt": turn.exempt,
            "tidegate.policy": turn.policy or None,
            "tidegate.oldest_version": turn.oldest_version(),
        }
    )


def _tool_call(call: ToolCall) -> Attributes:
    return _known(
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "tidegate.turn": call.turn,
            "tidegate.tool_known": call.known,
        }
    )


def _known(values: Mapping[str, str | float | None]) -> Attributes:
    # OpenTelemetry has no null attribute.
    return {name: value for name, value in values.items() if value is not None}
