"""The servers under test and their load, as processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval.unbatched import K
from turns.systems import Loader, Processes, System, until

_SEARCH = "/v1/search"


class RagProcesses(Processes):
    """Starts retrieval servers, one thread a search each, and ends them."""

    def server(self, index: Path, *options: str) -> System:
        command = [sys.executable, "-m", "tidegate", "rag", "serve", str(index), "--k", str(K)]
        command += ["--threads", "1", "--port", "0", *options, "--announce"]
        system = self._announced("tidegate", command, _SEARCH)
        until(lambda: _ready(system.url), system, "open its index")
        return system

    def unbatched(self, index: Path) -> System:
        return self._announced(
            "unbatched", [sys.executable, "-m", "retrieval.unbatched", str(index)], _SEARCH
        )

    def load(self) -> Searches:
        command = [sys.executable, "-m", "retrieval.load"]
        return Searches(self._start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))


class Searches(Loader):
    """The load generator's process."""

    def searches(
        self, system: System, queries: Sequence[str], clients: int, seconds: float | None = None
    ) -> dict[str, Any]:
        """Ask the queries; `retrieval.load` says what comes back."""
        job = {"url": system.url, "queries": queries, "clients": clients, "seconds": seconds}
        return self.ask(job)


def _ready(url: str) -> bool:
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/ready", timeout=10):
        return True
    return False
