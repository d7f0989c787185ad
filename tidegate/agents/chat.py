"""The built-in agents `chat` and `shell`: talk to the model, the environment's tools and its counterpart."""

from __future__ import annotations

from typing import Any

from tidegate.agents.base import Agent, Session
from tidegate.errors import ConfigError
from tidegate.types import TaskView

SHELL_INSTRUCTIONS = (
    "You work in a Linux shell, with the tool `bash`. Each command starts in the same folder, and only files "
    "are kept between commands. Look before you change anything. When the task is done, reply without a "
    "command."
)


class ChatAgent(Agent):
    """Plays an episode: model reply → its tool calls → model reply → … → response of the counterpart → ….

    It ends when the environment's conversation is over, which without a counterpart is after the first reply
    without tool calls. The output is the content of the last reply.

    Args:
        max_turns: Limit of model replies.
        instructions: System message before the task; by default there is none.

    Raises:
        ConfigError: `max_turns` is less than 1.
    """

    def __init__(self, max_turns: int = 16, instructions: str = "") -> None:
        if max_turns < 1:
            raise ConfigError(f"agent.options.max_turns = {max_turns} must be at least 1")
        self.max_turns = max_turns
        self.instructions = instructions

    async def run(self, task: TaskView, session: Session) -> str | None:
        llm = session.openai()
        tools: Any = await session.tools()
        offered = {"tools": tools} if tools else {}
        messages: list[Any] = [*task.messages]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        content = None
        for _ in range(self.max_turns):
            reply = await llm.chat.completions.create(model=session.model, messages=messages, **offered)
            message = reply.choices[0].message
            content = message.content
            messages.append(message.model_dump(exclude_none=True))
            if message.tool_calls:
                # One after another, in the model's order, as each may change the state.
                messages += [await session.call(call) for call in message.tool_calls]
                continue
            following = await session.respond(messages[-1])
            if following is None:
                break
            messages.append(following)
        return content


class ShellAgent(ChatAgent):
    """The agent `chat` with instructions and a limit for work in a shell: until a reply without a command.

    Args:
        max_turns: Limit of model replies.
        instructions: System message before the task; an empty text for none.

    Raises:
        ConfigError: `max_turns` is less than 1.
    """

    def __init__(self, max_turns: int = 32, instructions: str = SHELL_INSTRUCTIONS) -> None:
        super().__init__(max_turns, instructions)
