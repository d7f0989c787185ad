"""Checks that sandboxes start, where the settings use them."""

from __future__ import annotations

from tidegate.config import Settings
from tidegate.doctor.findings import Finding, error, ok
from tidegate.errors import SandboxError
from tidegate.sandbox import open_sandbox

OPTION = "sandbox"
"""Option of agents and environments that names a backend."""


async def check_sandbox(settings: Settings) -> list[Finding]:
    """Opens a sandbox and runs a command in it; no finding if no option `sandbox` is `bubblewrap`."""
    if "bubblewrap" not in (settings.agent.options.get(OPTION), settings.env.options.get(OPTION)):
        return []
    try:
        async with await open_sandbox() as box:
            result = await box.run("true", 10)
    except SandboxError as failure:
        text = f"no sandbox can be started: {failure}"
        return [error("sandbox", "sandbox_does_not_start", text, "docs/sandbox.md has the requirements")]
    if not result.ok:
        text = f"`true` ended with exit code {result.exit_code} in a sandbox: {result.stderr[-500:]}"
        return [error("sandbox", "sandbox_broken", text)]
    return [ok("sandbox", f"bubblewrap starts sandboxes; a command takes {1000 * result.seconds:.0f} ms")]
