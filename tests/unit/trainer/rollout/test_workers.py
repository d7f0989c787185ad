"""What a run does while no worker is connected."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tidegate.config import load_settings
from tidegate.errors import GatewayError
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.rollout import episodes
from tidegate.trainer.rollout.episodes import EpisodeSource, watch_workers
from tidegate.trainer.rollout.pause import NO_WORKER, Pause
from tidegate.types import Sampling, Task


def test_a_run_without_workers_or_engines_waits_for_both() -> None:
    notes: list[str] = []
    rules = Rules(groups_per_batch=2, group_size=2, min_group_size=2, max_staleness=0)
    admission = Admission(rules, lambda _: None)
    pause = Pause(admission=admission, note=notes.append, limit_s=60.0)
    pause.set_serving(False, NO_WORKER)
    assert notes == [f"paused by an outage: {NO_WORKER}. Until it is over, no attempt starts"]
    pause.set_serving(False)
    pause.set_serving(True, NO_WORKER)
    assert admission.outage.down == "no engine serves"
    assert not admission.outage.may_attempt()
    pause.set_serving(False, policies={"verifier"})
    assert admission.outage.down == "no engine serves policy verifier"
    pause.set_serving(True)
    assert admission.outage.may_attempt()
    assert len(notes) == 2
    assert notes[1].startswith("resumed")


class Gateway:
    """Lists workers as scripted, and waits for results for ever."""

    def __init__(self, answers: list[bool | None]) -> None:
        self.answers = answers
        self.deleted: list[str] = []

    async def attempts(self) -> dict[str, Any]:
        connected = self.answers.pop(0)
        if connected is None:
            raise GatewayError("restarting")
        return {"queued": 0, "workers": [{"connected": connected}]}

    async def open_session(self, **options: Any) -> Any:
        assert options["offer_heartbeat_s"] == 10.0
        return cast(Any, type("Access", (), {"session_id": "s1"}))

    async def result(self, session_id: str) -> None:
        await asyncio.sleep(60)

    async def delete_session(self, session_id: str) -> None:
        self.deleted.append(session_id)


async def test_workers_are_watched_over_restarts_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "WORKERS_POLL_S", 0.0)
    told: list[bool] = []
    gateway = Gateway([False, True, None, False])
    with pytest.raises(IndexError):
        await watch_workers(cast(Any, gateway), told.append)
    assert told == [False, True, True], "a restarted gateway does not know its workers at once"


@pytest.mark.parametrize(("group", "deleted"), [(None, ["s1"]), ("g1", [])])
async def test_a_cancelled_episode_of_no_group_is_withdrawn(group: str | None, deleted: list[str]) -> None:
    gateway = Gateway([])
    agent = load_settings(None, ["--model.path=x", "--agent.source=remote"]).agent
    source = EpisodeSource.of(agent, cast(Any, gateway), 1)
    running = asyncio.create_task(
        source.run("eval0/1", Task("t", "e", []), Sampling(), "eval", group_id=group)
    )
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert gateway.deleted == deleted
