"""Environments of verifiers: `env.use = "verifiers:reverse-text"`.

The library's own rollout runs in the environment's process. Its model client does not call a model: it passes
each prompt to the agent, and the agent's reply to the rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

from tidegate.envs.adapters.library import require
from tidegate.envs.adapters.verifiers_rows import VerifiersRows, row_of
from tidegate.envs.base import Done
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.tools import Tool, ToolError
from tidegate.errors import ConfigError, RewardError
from tidegate.types import Message, Task


@dataclass
class VerifiersRollout:
    """The state of an episode: a rollout of the library that waits for the agent's next reply."""

    prompts: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    """Prompts of the rollout's calls; None: the rollout ended."""
    replies: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)
    """The agent's replies; None: there are no more."""
    running: asyncio.Task[Any] | None = None
    given: int = 0
    """Number of the agent's replies that the rollout received."""
    length: int = 0
    """Number of messages in the newest prompt."""
    ended: bool = False

    async def give(self, reply: Message | None) -> Any:
        """Passes a reply to the rollout; returns its next prompt, None if it ended."""
        self.given += reply is not None
        await self.replies.put(reply)
        return await self.next_prompt()

    async def next_prompt(self) -> Any:
        """Returns the prompt of the rollout's next call, None if it ended."""
        prompt = await self.prompts.get()
        self.ended = prompt is None
        return prompt


class Verifiers(VerifiersRows):
    """Tasks, turns and rewards of an environment of verifiers with its classic interface.

    The environment's rubric scores an episode; the metrics are recorded. In a `ToolEnv` the agent calls the
    tools through Tidegate, and when the episode is scored, the rollout calls them again with the same
    arguments: their results must depend on the arguments alone.

    Args:
        id: Name of the environment, a package that is installed.
        args: Arguments of its `load_environment`.
        held_out: Number of held-out tasks: the first rows of its evaluation data, or, if it has none, of its
            training data, which are then not trained on.
        seed: Determines the order of the training tasks.
        score: False: the agent `verifiers` scores the episodes, see docs/adapters.md.

    Raises:
        ConfigError: The library or the environment's package is missing, or the environment keeps a state
            that only the agent `verifiers` can handle.
    """

    name: ClassVar[str] = "verifiers"

    def __init__(
        self,
        id: str,
        args: Mapping[str, Any] | None = None,
        held_out: int = 100,
        seed: int = 0,
        score: bool = True,
    ) -> None:
        super().__init__(id, args, held_out, seed)
        vf = require("verifiers")
        self._tool_env = isinstance(self.library, vf.ToolEnv)
        self.rewards = (Reward("score", self._score),) if score else ()
        self._stateful = score
        if not score:
            return
        alone = "set env.options.score = false and use the agent 'verifiers' (docs/adapters.md)"
        if not isinstance(self.library, vf.MultiTurnEnv) or isinstance(self.library, vf.StatefulToolEnv):
            kind = type(self.library).__name__
            raise ConfigError(f"verifiers:{id} is a {kind}, which runs its own tools: {alone}")
        if self.library.requires_group_rollouts:
            raise ConfigError(
                f"verifiers:{id} scores the episodes of a group together, which is not possible"
            )

    @property
    def stateful(self) -> bool:
        return self._stateful

    def tools(self) -> Sequence[Tool]:
        if not self._tool_env:
            return ()
        return [
            Tool(one.name, one.description, one.parameters, partial(self._call, one.name))
            for one in self.library.tool_defs
        ]

    async def setup(self, task: Task) -> VerifiersRollout:
        rollout = VerifiersRollout()
        row = row_of(self.library, task.id)

        async def run() -> Any:
            client = self._client_class(rollout)
            try:
                return await self.library.run_rollout(row, client, "policy", {})
            finally:
                await rollout.prompts.put(None)

        rollout.running = asyncio.create_task(run(), name=f"verifiers {task.id}")
        prompt = await rollout.next_prompt()
        if rollout.ended:
            await rollout.running
        rollout.length = len(prompt or ())
        return rollout

    async def respond(self, state: VerifiersRollout, reply: Message) -> Message | str | Done:
        if self._tool_env:
            return Done()
        prompt = await state.give(reply)
        if prompt is None:
            return Done()
        new = [_plain(message) for message in prompt[state.length + 1 :]]
        state.length = len(prompt)
        if len(new) != 1:
            return "\n\n".join(str(message["content"]) for message in new)
        return new[0]

    async def teardown(self, state: VerifiersRollout) -> None:
        if state.running is not None and not state.running.done():
            state.running.cancel()
            await asyncio.wait([state.running], timeout=10)

    async def _score(self, task: Task, messages: Sequence[Message], state: VerifiersRollout) -> Grade:
        """Passes on the replies that `respond` did not, ends the rollout, and returns its reward."""
        prompt_length = len(task.messages)
        replies = [one for one in messages[prompt_length:] if one["role"] == "assistant"]
        running = state.running
        assert running is not None
        for reply in [*replies[state.given :], None]:
            if not state.ended:
                await state.give(reply)
        result = await running
        if result.get("error"):
            raise RewardError(f"the rollout of verifiers failed: {result['error']!r}")
        metrics = {name: float(value) for name, value in (result.get("metrics") or {}).items()}
        return Grade(float(result["reward"]), metrics)

    async def _call(self, name: str, _state: VerifiersRollout, arguments: Mapping[str, Any]) -> str:
        try:
            message = await self.library.call_tool(name, dict(arguments), "call")
        except Exception as error:
            raise ToolError(self.library.error_formatter(error)) from error
        return str(message.content)

    @cached_property
    def _client_class(self) -> Any:
        """Returns the class of the rollout's model client, which needs the library as its base."""
        clients = require("verifiers.clients")
        errors, types = require("verifiers.errors"), require("verifiers.types")

        class AgentClient(clients.OpenAIChatCompletionsClient):  # type: ignore[misc, name-defined]
            def __init__(self, rollout: VerifiersRollout) -> None:
                super().__init__(None)
                self.rollout = rollout

            async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Any:
                await self.rollout.prompts.put(prompt)
                reply = await self.rollout.replies.get()
                if reply is None:
                    raise errors.OverlongPromptError("the agent ended the episode")
                return as_response(types, reply, model)

        return AgentClient


def as_response(types: Any, reply: Message, model: str) -> Any:
    """Returns the agent's reply as a response of verifiers' model client."""
    calls = [
        types.ToolCall(id=one["id"], name=one["function"]["name"], arguments=one["function"]["arguments"])
        for one in reply.get("tool_calls") or ()
    ]
    message = types.ResponseMessage(
        content=reply.get("content"),
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return types.Response(id="tidegate", created=0, model=model, message=message)


def _plain(message: Any) -> Message:
    """Returns a message of verifiers as a plain one."""
    return {"role": message["role"], "content": message["content"]}
