"""What an agents' process prints when an agent fails."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import PermissionDeniedError

from tests.waiting import eventually
from tidegate.agents.base import Session, agent
from tidegate.agents.episode_runner import EpisodeRunner
from tidegate.gateway.errors import session_closed
from tidegate.types import TaskView

ACCESS = {"base_url": "http://gate/s/1/v1", "api_key": "k", "model": "m", "seed": None, "deadline_s": 30.0}


@pytest.mark.parametrize(("reason", "traced"), [("the run has ended", False), (None, True)])
async def test_a_call_after_the_end_of_the_session_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], reason: str | None, traced: bool
) -> None:
    """Agents that still run when a run ends get status 403, after its success."""
    text = "a rule of the service forbids it" if reason is None else str(session_closed(reason))
    refusal = httpx.Response(403, request=httpx.Request("POST", "http://gate/s/1/v1/chat/completions"))

    @agent
    async def calls(task: TaskView, session: Session) -> str:
        try:
            raise PermissionDeniedError(text, response=refusal, body=None)
        except PermissionDeniedError as error:
            raise RuntimeError("my agent failed") from error

    events: list[dict[str, Any]] = []
    EpisodeRunner(calls, events.append).start("one", {"id": "t", "messages": []}, ACCESS)
    await eventually(lambda: events)
    assert (events[0]["outcome"], "my agent failed" in events[0]["error"]) == ("agent_error", True)
    told = capsys.readouterr().err
    assert ("my agent failed" in told, "Traceback" in told) == (True, traced)
