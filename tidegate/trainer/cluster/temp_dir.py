"""A directory that goes with the process that made it, also when that is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SWEEPER = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$0") >/dev/null 2>&1 &'
"""Waits for the end of its standard input, and removes; in the background, as nobody's child."""


class TempDir:
    """Made in the node's directory for temporary files (TMPDIR)."""

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        theirs, self._ours = os.pipe()
        try:
            # In a session of its own: Ray ends the process group of an actor that died.
            command = ["sh", "-c", _SWEEPER, str(self.path)]
            subprocess.run(command, stdin=theirs, check=True, start_new_session=True)
        finally:
            os.close(theirs)

    def remove(self) -> None:
        """Remove it now; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1
