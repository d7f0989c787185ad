"""The environment of the shell demo: generated tasks on files, whose result a fresh sandbox verifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from examples.shell.file_tasks import ShellTask, Split, draw_task
from tidegate.envs.rewards import Reward
from tidegate.envs.shell.sandboxed import OUTPUT_CHARS, SandboxedEnvironment, SandboxEpisode
from tidegate.errors import ConfigError
from tidegate.sandbox import verify_fresh
from tidegate.types import Task

EXPECTED = "/tmp/expected"
CHECK = ("diff", "--recursive", "--brief", "--no-dereference", "--ignore-trailing-space", EXPECTED)


class Shell(SandboxedEnvironment):
    """Tasks on the files of a generated folder: find, count, edit, move, extract.

    The reward is 1 if the folder has exactly the expected files, except for blanks at the ends of lines. A
    fresh sandbox, which has the agent's files and nothing else of its sandbox, compares them.

    Args:
        seed: Determines all tasks.
        held_out: Number of held-out tasks.
        sandbox, image, limits, output_chars: See `SandboxedEnvironment`.

    Raises:
        ConfigError: An option is invalid.
    """

    name: ClassVar[str] = "shell"

    def __init__(
        self,
        seed: int = 0,
        held_out: int = 200,
        sandbox: str = "bubblewrap",
        image: str | None = None,
        limits: Mapping[str, Any] | None = None,
        output_chars: int = OUTPUT_CHARS,
    ) -> None:
        super().__init__(sandbox, image, limits, output_chars)
        if held_out < 1:
            raise ConfigError(f"shell: held_out = {held_out} must be at least 1")
        self._seed = seed
        self._held_out = held_out
        self.rewards = (Reward("solved", self._solved),)

    def train_task(self, index: int) -> Task:
        return self._task("train", index)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [self._task("held_out", index) for index in range(self._held_out)]}

    async def setup(self, task: Task) -> SandboxEpisode:
        """Opens the episode's sandbox; raises SandboxError if it cannot start."""
        return SandboxEpisode(await self.open(task.info["before"]))

    async def _solved(self, state: SandboxEpisode, info: Mapping[str, Any]) -> float:
        expected = {f"{EXPECTED}/{path}": content for path, content in info["after"].items()}
        result = await verify_fresh(state.box, [*CHECK, state.box.work], expected)
        return float(result.ok)

    def _task(self, split: Split, index: int) -> Task:
        task = drawn(self._seed, split, index)
        info = {"kind": task.kind, "before": dict(task.before), "after": dict(task.after)}
        return Task(f"{split}-{index}", self.name, [{"role": "user", "content": task.prompt}], info=info)


def drawn(seed: int, split: Split, index: int) -> ShellTask:
    """Returns the task at an index; tasks of neighbouring indices are unrelated."""
    return draw_task(Random(f"shell/{seed}/{split}/{index}"), split)
