"""The backend `none`: the interface of a sandbox without its protection, for trusted programs and tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile

from tidegate.sandbox.limits import SandboxLimits
from tidegate.sandbox.owned import owned_name, remove_orphans
from tidegate.sandbox.supervised import SupervisedSandbox, supervisor_command

CODE = os.path.dirname(os.path.abspath(__file__))


class UnprotectedSandbox(SupervisedSandbox):
    """A temporary folder and a supervisor of its processes.

    Programs in it are ordinary processes of the owner's user: they can read and write everything that the
    user can, and use the network. Limits and the end of all processes hold for programs that do not evade
    them.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        super().__init__(limits, os.path.join(tempfile.gettempdir(), owned_name()))

    async def _begin(self) -> None:
        """Makes the folder, and starts the supervisor; raises SandboxError if it does not start."""
        await asyncio.to_thread(remove_orphans)
        os.mkdir(self.work, 0o700)
        path = os.environ.get("PATH", os.defpath)
        owner = os.pidfd_open(os.getpid())
        try:
            command = supervisor_command(CODE, self.work, self.limits, owner, path)
            await self._start(command, pass_fds=[owner])
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, self.work, ignore_errors=True)
            raise
        finally:
            os.close(owner)

    async def fresh(self) -> UnprotectedSandbox:
        return await UnprotectedSandbox(self.limits).start()

    async def reach(self, url: str) -> str:
        return url

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(shutil.rmtree, self.work, ignore_errors=True)
