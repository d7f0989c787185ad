"""A group filter of the user's own: `trainer.filter = "file.py:function"`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidegate.errors import TrainingError
from tidegate.loading import load_object
from tidegate.types import Group

FILTER_S = 60.0
"""Time limit of one call."""


class GroupFilter:
    """Calls the function with each leased group; a group for which it returns False ends `filtered`.

    Args:
        use: `file.py:function` or `module:function`.

    Raises:
        ConfigError: There is no such function, or its module cannot be imported.
    """

    def __init__(self, use: str) -> None:
        self.use = use
        self._keeps: Callable[[Group], object] = load_object(use, {}, "filter")

    async def keeps(self, group: Group) -> bool:
        """Return whether to train on the group.

        Raises:
            TrainingError: The function raised, took too long, or returned neither True nor False.
        """
        try:
            # In a thread, so that a slow function does not stop the event loop.
            verdict = await asyncio.wait_for(asyncio.to_thread(self._keeps, group), FILTER_S)
        except Exception as error:
            raise TrainingError(
                f"trainer.filter = {self.use!r} failed on group {group.id} of task {group.task_id!r} "
                f"({type(error).__name__}: {error}): repair the function, or remove the setting"
            ) from error
        if not isinstance(verdict, bool):
            raise TrainingError(
                f"trainer.filter = {self.use!r} returned {verdict!r:.80} for group {group.id}: it must "
                "return True to train on the group, or False"
            )
        return verdict
