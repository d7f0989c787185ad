"""Runs a check in a new sandbox that has the files of a used one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.sandbox.inside.archive import OverLimit
from tidegate.sandbox.sandbox import CommandResult, Sandbox

NO_SNAPSHOT = 125
"""Exit code where the files could not be carried over."""


async def verify_fresh(
    box: Sandbox,
    command: str | Sequence[str],
    files: Mapping[str, bytes | str] | None = None,
    *,
    timeout_s: float | None = None,
) -> CommandResult:
    """Runs a command in a new sandbox with the files that an agent has left in another one.

    Nothing else is carried over: no processes, no links, no files outside of the folder `work`. The files of
    the check are written after the agent's and replace those of the same names. Files that the agent left
    beside them can still influence the check, such as modules that it imports; to prevent this, give the
    check a folder of its own: `files={"/tmp/check/test.py": …}` and `python3 -I /tmp/check/test.py`.

    Args:
        box: The agent's sandbox; it stays open.
        command: Program and arguments, as for `Sandbox.run`.
        timeout_s: As for `Sandbox.run`.
        files: Files of the check, as path → content.

    Returns:
        The result; exit code 125 and the limit `files` if the agent's files are too many or too large.

    Raises:
        SandboxError: A sandbox cannot start, or has failed.
    """
    try:
        snapshot = await box.snapshot()
    except OverLimit as error:
        return CommandResult(
            NO_SNAPSHOT, "", f"the files cannot be carried over: {error}", 0.0, limit="files"
        )
    async with await box.fresh() as fresh:
        await fresh.restore(snapshot)
        await fresh.add_files(files or {})
        return await fresh.run(command, timeout_s)
