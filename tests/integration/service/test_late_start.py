"""The message on a process that is not ready in time tells a busy machine from a process that waits."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tidegate.errors import StartError
from tidegate.service.service import Service


class Waits(Service):
    """A server that never announces its address."""

    def command(self) -> list[str]:
        program = "import sys; print('opens the journal', file=sys.stderr, flush=True); input()"
        return [sys.executable, "-c", program]


@pytest.mark.parametrize(("load", "busy"), [(0.5, False), (10_000.0, True)])
async def test_a_late_start_names_load_and_cpu_time(
    load: float, busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    service = Waits("gateway", list, tmp_path, ready_s=0.1)
    with pytest.raises(StartError) as raised:
        await service.start()
    said = str(raised.value)
    assert re.match(r"the gateway was not ready after 0\.1 s, \d s of them on a CPU; ", said)
    assert f"the machine's load is {load:.1f} on " in said
    assert ("end other programs" in said) is busy
    assert str(tmp_path / "logs/gateway.log") in said
    assert await service.wait_for_exit() == "the gateway was killed by SIGTERM"
