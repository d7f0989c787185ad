"""The environment `harbor`: task folders in Harbor's format, in bubblewrap sandboxes."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from tidegate.envs.datasets.finite import Finite
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.shell.sandboxed import OUTPUT_CHARS, SandboxedEnvironment, SandboxEpisode
from tidegate.envs.shell.task_folder import TaskFolder, read_task_folder, read_task_folders
from tidegate.errors import RewardError
from tidegate.sandbox import verify_fresh
from tidegate.sandbox.bubblewrap import WORK
from tidegate.sandbox.inside.archive import make_tar
from tidegate.service import exact
from tidegate.types import Task, finite

PLACE = "/tmp/harbor"
LINKS = {"/tests": f"{PLACE}/tests", "/logs": f"{PLACE}/logs"}
"""Folders of Harbor's containers, which a sandbox has at another place."""
MAKE_FOLDERS = f"mkdir -p {PLACE}/tests {PLACE}/logs/verifier {PLACE}/logs/agent {PLACE}/logs/artifacts"
VERIFY = f"""\
{MAKE_FOLDERS}
bash /tests/test.sh >/logs/verifier/test-stdout.txt 2>&1
cat /logs/verifier/reward.json 2>/dev/null; printf '\\0'; cat /logs/verifier/reward.txt 2>/dev/null
printf '\\0'; tail -c 300 /logs/verifier/test-stdout.txt
"""
"""Prints reward.json, reward.txt and the end of the tests' output, with a NUL between them."""


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
        exceeded = result.timed_out or result.limit is not None
        try:
            if not exceeded:
                return graded(result.stdout)
        except RewardError as error:
            # A full disk ends no process: its writes fail, and the script may go on without a reward.
            if os.strerror(errno.ENOSPC) not in str(error):
                raise
        # The work caused it: a policy cannot discard an episode by work that hangs or fills the disk.
        return Grade(0.0, {"without_reward": 1.0})

    def _folder(self, task: Task) -> TaskFolder:
        return read_task_folder(Path(task.info["folder"]), self._ignore_dockerfile)

    def _task(self, folder: TaskFolder) -> Task:
        messages = [{"role": "user", "content": folder.instruction}]
        return Task(folder.path.name, self.name, messages, info={"folder": str(folder.path)})


def graded(text: str) -> Grade:
    """Returns the grade for what VERIFY prints.

    As in Harbor, reward.json precedes reward.txt, which is read by Python's `float`. The reward of an object
    is its `reward`, and its other numbers are metrics; values of other types are ignored. If it has no
    `reward`, reward.txt has the reward, or else it is the mean of the numbers.

    Raises:
        RewardError: There is not one finite number, or a key occurs twice. Several numbers have a mean only
            from −1 to 1, because counts and seconds are no rewards.
    """
    report, line, log = [*text.split("\0"), "", ""][:3]
    values = _numbers(report)
    reward = values.pop("reward", None)
    if reward is None:
        reward = _float(line)
    if reward is None and (len(values) == 1 or all(abs(value) <= 1 for value in values.values())):
        reward = sum(values.values()) / len(values) if values else None
    if reward is None:
        raise RewardError(
            f"test.sh wrote no reward: reward.json is {report[:200]!r}, reward.txt {line[:200]!r}; write one "
            f"finite number to /logs/verifier/reward.txt, or as `reward` to reward.json. The script's output "
            f"ends with {log!r}"
        )
    return Grade(reward, {"without_reward": 0.0, **values})


def _numbers(text: str) -> dict[str, float]:
    """Returns the finite numbers of an object, a single number as `reward`. Raises RewardError for a key that
    occurs twice."""
    try:
        read = json.loads(text, object_pairs_hook=exact.distinct)
    except (json.JSONDecodeError, RecursionError):
        read = None
    except ValueError as error:
        raise RewardError(f"test.sh wrote an unclear reward.json: {error}; write each value once") from None
    named = read if isinstance(read, dict) else {"reward": _float(text)}
    numbers = {}
    for name, value in named.items():
        if isinstance(value, int | float):
            with suppress(RewardError):
                numbers[name] = finite(name, value)
    return numbers


def _float(text: str) -> float | None:
    with suppress(ValueError, RewardError):
        return finite("reward.txt", float(text))
    return None
