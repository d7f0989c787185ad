"""The agent `verifiers`: the library's own rollout, with the session as its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.envs.adapters.library import require
from tidegate.envs.adapters.verifiers_rows import load, row_of
from tidegate.types import TaskView


class VerifiersAgent(Agent):
    """Runs and scores episodes of a verifiers environment by the library's own code, in the agent's process.

    For environments that keep a state, run their own tools or replace the library's loop. The settings need
    `env.use = "verifiers:<id>"` with `env.options.score = false`, so that the agent's reward counts.

    Args:
        id: Name of the environment, as in `env.use`.
        args: Arguments of its `load_environment`, as in `env.options.args`.

    Raises:
        ConfigError: The library or the environment's package is missing, or it cannot be loaded.
    """

    def __init__(self, id: str, args: Mapping[str, Any] | None = None) -> None:
        self._environment = load(id, args or {})
        self._client = require("verifiers.clients").OpenAIChatCompletionsClient

    async def run(self, task: TaskView, session: Session) -> Result:
        row = row_of(self._environment, task.id)
        columns = ["completion"]
        result = await self._environment.run_rollout(
            row, self._client(session.openai()), session.model, {}, state_columns=columns
        )
        if result.get("error"):
            raise RuntimeError(f"the rollout of verifiers failed: {result['error']}")
        replies = [one for one in result["completion"] or () if one["role"] == "assistant"]
        output = str(replies[-1].get("content") or "") if replies else None
        metrics = {name: float(value) for name, value in (result.get("metrics") or {}).items()}
        return Result(output, float(result["reward"]), metrics)
