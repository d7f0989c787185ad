"""Base class of environments whose episodes have a sandbox of their own and the tool `bash`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tidegate.envs.base import Environment
from tidegate.envs.tools import tool
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.sandbox import CommandResult, Sandbox, SandboxLimits, open_sandbox
from tidegate.sandbox.opening import check_backend

NO_OUTPUT = "(no output)"
OUTPUT_CHARS = 8000


@dataclass(frozen=True, slots=True)
class SandboxEpisode:
    """The state of an episode."""

    box: Sandbox
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the commands."""
    folder: str = ""
    """Folder in which each command starts; by default the sandbox's working folder."""


class SandboxedEnvironment(Environment):
    """Each episode has a sandbox, which `setup` of the subclass opens.

    Args:
        sandbox: Backend of the sandboxes.
        image: Image of the containers, for the backends `docker` and `podman`.
        limits: Fields of `SandboxLimits`; `wall_s` is the limit of one command.
        output_chars: Characters that the agent receives of a command's output; the middle of a longer one is
            left out.

    Raises:
        ConfigError: The backend or a limit is unknown, or the backend takes no image.
    """

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        image: str | None = None,
        limits: Mapping[str, Any] | None = None,
        output_chars: int = OUTPUT_CHARS,
    ) -> None:
        check_backend(sandbox, image=image)
        if output_chars < 1:
            raise ConfigError(f"env.options.output_chars = {output_chars} must be at least 1")
        known = [one.name for one in fields(SandboxLimits)]
        for name in limits or {}:
            if name not in known:
                hint = f"{did_you_mean(name, known)}; known: {', '.join(known)}"
                raise ConfigError(f"env.options.limits has no {name!r}{hint}")
        self._backend, self._image = sandbox, image
        self._limits = SandboxLimits(**(limits or {}))
        self._output_chars = output_chars

    async def open(
        self, files: Mapping[str, bytes | str] | None = None, links: Mapping[str, str] | None = None
    ) -> Sandbox:
        """Opens a sandbox, which the caller closes.

        Args:
            files, links: See `open_sandbox`.

        Raises:
            SandboxError: It cannot start.
        """
        return await open_sandbox(self._limits, self._backend, files, image=self._image, links=links)

    async def teardown(self, state: SandboxEpisode) -> None:
        await state.box.close()

    @tool
    async def bash(self, state: SandboxEpisode, command: str) -> str:
        """Runs a command line in bash and returns its output.

        Args:
            command: The command line.
        """
        result = await state.box.run(["bash", "-c", command], env=state.variables, cwd=state.folder)
        return shown(result, self._output_chars)


def shown(result: CommandResult, most: int) -> str:
    """Returns the text that an agent reads: both outputs, then how the command ended unless it succeeded."""
    text = result.stdout + result.stderr
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    lines = [text.rstrip("\n")] if text.strip("\n") else []
    if result.timed_out:
        lines.append("[timeout]")
    elif result.limit is not None:
        lines.append(f"[killed: the limit of {result.limit} was exceeded]")
    elif result.exit_code != 0:
        lines.append(f"[exit status {result.exit_code}]")
    return "\n".join(lines) or NO_OUTPUT
