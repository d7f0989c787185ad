"""The environment `harbor`: task folders in Harbor's format, in bubblewrap sandboxes."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tidegate.envs.datasets.finite import Finite
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.shell.sandboxed import OUTPUT_CHARS, SandboxedEnvironment, SandboxEpisode
from tidegate.envs.shell.task_folder import TaskFolder, read_task_folder, read_task_folders
from tidegate.sandbox import verify_fresh
from tidegate.sandbox.bubblewrap import WORK
from tidegate.sandbox.inside.archive import make_tar
from tidegate.types import Task

PLACE = "/tmp/harbor"
LINKS = {"/tests": f"{PLACE}/tests", "/logs": f"{PLACE}/logs"}
"""Folders of Harbor's containers, which a sandbox has at another place."""
MAKE_FOLDERS = f"mkdir -p {PLACE}/tests {PLACE}/logs/verifier {PLACE}/logs/agent {PLACE}/logs/artifacts"
VERIFY = f"""\
{MAKE_FOLDERS}
bash /tests/test.sh >/logs/verifier/test-stdout.txt 2>&1
cat /logs/verifier/reward.json 2>/dev/null || cat /logs/verifier/reward.txt
"""


class Harbor(SandboxedEnvironment, Finite):
    """Tasks of folders in the format of Harbor: instruction, settings, environment and tests.

    The files of `environment/` are copied into the working folder of a sandbox. No image is built, and there
    is no network. The reward is what tests/test.sh writes to /logs/verifier/reward.json or reward.txt,
    in a fresh sandbox with the agent's files of the working folder; 0 if it writes none.

    Args:
        path: Folder of the training tasks.
        eval_path: Folder of the held-out tasks.
        ignore_dockerfile: Accept tasks whose Dockerfile has instructions that are not carried out.
        seed: Determines the order of training.
        limits, output_chars: See `SandboxedEnvironment`.

    Raises:
        ConfigError: An option is invalid, or a task is invalid or needs what is not supported.
    """

    name: ClassVar[str] = "harbor"

    def __init__(
        self,
        path: str,
        eval_path: str,
        ignore_dockerfile: bool = False,
        seed: int = 0,
        limits: Mapping[str, Any] | None = None,
        output_chars: int = OUTPUT_CHARS,
    ) -> None:
        super().__init__("bubblewrap", None, limits, output_chars)
        self._ignore_dockerfile = ignore_dockerfile
        self.rewards = (Reward("reward", self._verified),)
        train, held_out = (
            [self._task(folder) for folder in read_task_folders(Path(one).expanduser(), ignore_dockerfile)]
            for one in (path, eval_path)
        )
        self._set_tasks(train, {"": held_out}, seed)

    async def setup(self, task: Task) -> SandboxEpisode:
        """Opens the episode's sandbox; raises SandboxError if it cannot start."""
        folder = self._folder(task)
        box = await self.open(links={**LINKS, folder.workdir: WORK})
        try:
            await box.restore(make_tar(folder.files()))
            await box.run(MAKE_FOLDERS)
        except BaseException:
            await box.close()
            raise
        return SandboxEpisode(box, {**folder.environment_env, "PWD": folder.workdir}, folder.workdir)

    async def _verified(self, state: SandboxEpisode, task: Task) -> Grade:
        folder = self._folder(task)
        tests = folder.tests()
        variables = {**state.variables, **folder.verifier_env}
        script = [
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"cd {shlex.quote(folder.workdir)}",
            *(
                f"chmod +x /tests/{shlex.quote(path)}"
                for path, (_, executable) in tests.items()
                if executable
            ),
            VERIFY,
        ]
        result = await verify_fresh(
            state.box,
            ["bash", "-c", "\n".join(script)],
            {f"{PLACE}/tests/{path}": content for path, (content, _) in tests.items()},
            timeout_s=folder.verifier_s,
        )
        return graded(result.stdout)

    def _folder(self, task: Task) -> TaskFolder:
        return read_task_folder(Path(task.info["folder"]), self._ignore_dockerfile)

    def _task(self, folder: TaskFolder) -> Task:
        messages = [{"role": "user", "content": folder.instruction}]
        return Task(folder.path.name, self.name, messages, info={"folder": str(folder.path)})


def graded(text: str) -> Grade:
    """Returns the grade for the text of a reward file: a number, or an object of numbers.

    The reward of an object is its `reward`, or the mean of all; the others are metrics. A text without finite
    numbers, and no text, are worth 0: a policy that breaks the tests is not excused.
    """
    try:
        read = json.loads(text)
        values = {name: float(value) for name, value in read.items()} if isinstance(read, dict) else {}
        values = values or {"reward": float(read)}
    except (ValueError, TypeError):
        values = {}
    if not values or not all(map(math.isfinite, values.values())):
        return Grade(0.0, {"without_reward": 1.0})
    others = {name: value for name, value in values.items() if name != "reward"}
    reward = values.get("reward", sum(values.values()) / len(values))
    return Grade(reward, {"without_reward": 0.0, **others})
