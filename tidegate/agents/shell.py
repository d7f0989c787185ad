"""The built-in agent `shell`: works with the environment's tool `bash` until it replies without a command."""

from __future__ import annotations

from tidegate.agents.chat import ChatAgent

INSTRUCTIONS = (
    "You work in a Linux shell, with the tool `bash`. Each command starts in the same folder, and only files "
    "are kept between commands. Look before you change anything. When the task is done, reply without a "
    "command."
)


class ShellAgent(ChatAgent):
    """The agent `chat` with instructions and a limit for work in a shell.

    Args:
        max_turns: Limit of model replies.
        instructions: System message before the task; an empty text for none.

    Raises:
        ConfigError: `max_turns` is less than 1.
    """

    def __init__(self, max_turns: int = 32, instructions: str = INSTRUCTIONS) -> None:
        super().__init__(max_turns, instructions)
