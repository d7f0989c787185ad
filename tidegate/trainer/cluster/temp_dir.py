"""A temporary directory that is removed when its process exits or is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SWEEPER = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$0") >/dev/null 2>&1 &'
"""Shell script that waits in the background for its standard input to close, then removes the directory."""


class TempDir:
    """A directory in TMPDIR."""

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        theirs, self._ours = os.pipe()
        try:
            # In its own session: Ray kills the process group of an exited actor.
            command = ["sh", "-c", _SWEEPER, str(self.path)]
            subprocess.run(command, stdin=theirs, check=True, start_new_session=True)
        finally:
            os.close(theirs)

    def remove(self) -> None:
        """Remove the directory now; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1
