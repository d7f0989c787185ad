"""Sandboxes for programs that are not trusted, with limits and without the network (docs/sandbox.md).

async with await open_sandbox(files={"sum.py": "print(1 + 1)"}) as box:
    result = await box.run("python3 sum.py", timeout_s=10)
"""

from tidegate.sandbox.limits import SandboxLimits
from tidegate.sandbox.opening import open_sandbox
from tidegate.sandbox.pool import SandboxPool
from tidegate.sandbox.sandbox import CommandResult, Sandbox
from tidegate.sandbox.verify import verify_fresh

__all__ = ["CommandResult", "Sandbox", "SandboxLimits", "SandboxPool", "open_sandbox", "verify_fresh"]
