"""The bridge to a web service and the service itself, as docs/agents.md has them."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from tests import REPO
from tests.fakes import staged
from tests.integration.gateway.control_stage import TASK, Sums
from tests.serving import served
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.base import Session
from tidegate.errors import InfrastructureError
from tidegate.types import Outcome


def from_page(name: str) -> dict[str, Any]:
    """The names that a file of the page defines."""
    page = (REPO / "docs" / "agents.md").read_text()
    [code] = re.findall(rf"```python\n# {name}\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


async def test_a_web_service_is_an_agent_through_the_bridge(tmp_path: Path) -> None:
    bridge, service = from_page("bridge.py")["bridge"], from_page("service.py")["app"]
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, rewarders={"sums": Sums()}) as stage, served(service) as url:
        access = await stage.client.open_session(task=TASK)
        session = Session(access.base_url, access.api_key, "policy", None, time.monotonic() + 30)
        answer = await bridge(TASK.view(), session, url=f"{url}/solve")
        summary = await stage.client.finish(access.session_id, output=answer)
        assert (summary.outcome, summary.turns) == (Outcome.COMPLETED, 1)
        trajectory = await stage.client.trajectory(access.session_id)
        assert trajectory.messages[-1]["content"] == answer


async def test_the_bridge_tells_a_lost_service_from_a_failing_one() -> None:
    bridge, failing = from_page("bridge.py")["bridge"], FastAPI()

    @failing.post("/solve")
    async def fail() -> None:
        raise HTTPException(500, "no answer")

    session = Session("http://127.0.0.1:1/v1", "key", "policy", None, time.monotonic() + 30)
    async with served(failing) as url:
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            await bridge(TASK.view(), session, url=f"{url}/solve")
    with pytest.raises(InfrastructureError, match="cannot be reached"):  # its port is closed now
        await bridge(TASK.view(), session, url=f"{url}/solve")
