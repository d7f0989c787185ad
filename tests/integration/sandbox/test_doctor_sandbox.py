"""The doctor's check of sandboxes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sandboxes import needs_bubblewrap
from tidegate.config import Settings
from tidegate.doctor.install import check_sandbox
from tidegate.scaffold.init import TINY_BASE


def settings(**options: Any) -> Settings:
    agent = {"use": "command", "options": {"command": ["true"], **options}}
    return Settings.model_validate({"model": {"path": str(TINY_BASE)}, "agent": agent})


@needs_bubblewrap
async def test_a_sandbox_is_tried_where_the_settings_use_one() -> None:
    assert await check_sandbox(settings()) == []
    [finding] = await check_sandbox(settings(sandbox="bubblewrap"))
    assert finding.code == "ok"


async def test_a_machine_without_bubblewrap_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    [finding] = await check_sandbox(settings(sandbox="bubblewrap"))
    assert finding.code == "sandbox_does_not_start"
    assert "apt-get install bubblewrap" in finding.text
