"""Reward functions of conversations: what they add, and what happens when they fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.fakes import Stage, eventually, staged
from tests.integration.gateway.test_conversations import IDLE_S, feedback, leased, say, sessions
from tests.tiny_tokenizer import make_model_dir
from tidegate.envs.conversations import ConversationRewards, conversation_environment
from tidegate.envs.service.scoring import score
from tidegate.errors import ConfigError, RewardError, RewardUnavailableError
from tidegate.gateway.groups import rewards
from tidegate.gateway.project_keys import create_key
from tidegate.types import CONVERSATION, Outcome, Task, Trajectory

GATE = threading.Event()
OUTAGES: list[str] = []
"""Sessions of the calls that failed."""


def asked(trajectory: Trajectory) -> float | None:
    """The reward that the conversation's first message asks for; an error if it is no number."""
    content = str(trajectory.messages[0]["content"])
    if content == "outage" and not GATE.is_set():
        OUTAGES.append(trajectory.session_id)
        raise RewardUnavailableError("the judge is unavailable")
    if content == "outage":
        return -0.5
    if content == "wait":
        GATE.wait(30)
        return 0.25
    return None if content == "none" else float(content)


def length(trajectory: Trajectory) -> float | None:
    return None if trajectory.messages[0]["content"] == "none" else float(len(trajectory.turns)) / 8


@pytest.fixture
def key(tmp_path: Path) -> str:
    return create_key(tmp_path / "keys.json", "me")


@pytest.fixture
def idle_s() -> float:
    return IDLE_S


@pytest.fixture
async def stage(tmp_path: Path, key: str, idle_s: float) -> AsyncIterator[Stage]:
    GATE.clear()
    scorer = ConversationRewards({"asked": asked, "length": length}, (-1.0, 1.0))
    options: dict[str, Any] = {
        "keys": tmp_path / "keys.json", "conversation_idle_s": idle_s, "feedback_window_s": 600.0,
        "rewarders": {CONVERSATION: scorer}, "reward_timeout_s": 20.0,
    }  # fmt: skip
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, journal=tmp_path / "journal", **options) as made:
        yield made
    GATE.set()


@pytest.fixture
async def user(stage: Stage, key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as made:
        yield made


async def test_a_conversation_without_feedback_is_scored_and_offered_to_the_trainer(
    stage: Stage, user: AsyncOpenAI
) -> None:
    messages: list[Any] = []
    await say(user, messages, "0.5")
    await say(user, messages, "more")
    trajectory = (await leased(stage)).trajectories[0]
    assert trajectory.reward == 0.75
    assert trajectory.reward_parts == {"asked": 0.5, "length": 0.25}


@pytest.mark.parametrize("idle_s", [3.0])
async def test_feedback_and_the_functions_values_are_added(stage: Stage, user: AsyncOpenAI, key: str) -> None:
    reply = await say(user, [], "-0.5")
    assert "group" in await feedback(stage, key, reply.id, "up")
    assert (await feedback(stage, key, reply.id, 1, name="asked"))[0] == 400
    trajectory = (await leased(stage)).trajectories[0]
    assert trajectory.reward == 0.625
    assert trajectory.reward_parts == {"feedback": 1.0, "asked": -0.5, "length": 0.125}


@pytest.mark.parametrize(
    ("content", "outcome"),
    [("none", "unrewarded"), ("no number", "reward_error"), ("nan", "reward_error"), ("1", "reward_error")],
)
async def test_without_an_opinion_or_with_an_error_a_conversation_is_not_trained_on(
    stage: Stage, user: AsyncOpenAI, content: str, outcome: str
) -> None:
    await say(user, [], content)
    await eventually(lambda: stage.gateway.metrics.outcomes[outcome] == 1)
    await say(user, [], "0.5")
    group = await leased(stage)
    assert group.trajectories[0].reward == 0.625, "the other one is not offered"
    assert len(stage.gateway.groups.entries()) == 1


@pytest.mark.parametrize("idle_s", [3.0])
async def test_a_conversation_waits_for_its_judge_and_keeps_its_feedback(
    stage: Stage, user: AsyncOpenAI, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "FIRST_S", 0.01)
    reply = await say(user, [], "outage")
    assert "group" in await feedback(stage, key, reply.id, "up")
    await eventually(lambda: len(OUTAGES) > 2)
    GATE.set()
    trajectory = (await leased(stage)).trajectories[0]
    assert trajectory.reward_parts == {"feedback": 1.0, "asked": -0.5, "length": 0.125}


async def test_a_slow_function_delays_no_other_conversation(stage: Stage, user: AsyncOpenAI) -> None:
    await say(user, [], "wait")
    slow = sessions(stage)[0]
    await eventually(lambda: slow.ending is not None)
    await say(user, [], "0.5")
    assert (await leased(stage)).trajectories[0].reward == 0.625
    assert slow.trajectory is None
    GATE.set()
    assert (await leased(stage)).trajectories[0].reward == 0.375


@pytest.mark.parametrize("headers", [{}, {"x-tidegate-session": "c1"}])
async def test_a_call_while_its_conversation_is_scored_begins_a_new_one(
    stage: Stage, user: AsyncOpenAI, key: str, headers: dict[str, str]
) -> None:
    messages: list[Any] = []
    reply = await say(user, messages, "wait", extra_headers=headers)
    [scored] = sessions(stage)
    await eventually(lambda: scored.ending is not None)
    assert (await feedback(stage, key, reply.id, "up"))[0] == 410
    await say(user, messages, "more", extra_headers=headers)
    GATE.set()
    trajectory = (await leased(stage)).trajectories[0]
    assert (trajectory.session_id, trajectory.reward) == (scored.id, 0.375), "without the late feedback"
    await say(user, messages, "and more", extra_headers=headers)
    [*_, new] = sessions(stage)
    assert new is not scored
    assert len(new.tree.nodes) == 2, "the name is that of the new one"


async def judged(trajectory: Trajectory) -> float | None:
    """As a judge that awaits a model's answer."""
    await asyncio.sleep(0)
    return {"good": 0.5, "nan": float("nan")}.get(str(trajectory.output))


@pytest.mark.parametrize(
    ("content", "parts"), [("good", {"judged": 0.5, "short": 0.25}), ("none", {"short": 0.25}), ("nan", None)]
)
async def test_an_async_function_is_awaited(content: str, parts: dict[str, float] | None) -> None:
    rewards = ConversationRewards({"short": lambda trajectory: 0.25, "judged": judged})
    ended = Trajectory("c", "", CONVERSATION, "train", Outcome.COMPLETED, [], output=content)
    scoring = score(rewards, Task(CONVERSATION, "", []), ended, content, [])
    if parts is None:
        with pytest.raises(RewardError, match="judged is nan, not a finite number"):
            await scoring
    else:
        assert (await scoring).parts == parts


def test_functions_are_loaded_by_name_and_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def polite(trajectory):\n    return 1.0\n\nnumber = 7\n")
    assert list(conversation_environment([f"{file}:polite"], None).names) == ["polite"]
    for uses, words in (
        ([f"{file}:rude"], "has no reward function 'rude'"),
        ([f"{file}:number"], "is not a function"),
        ([f"{file}:polite", f"{file}:polite"], "two functions named 'polite'"),
    ):
        with pytest.raises(ConfigError, match=words):
            conversation_environment(uses, None)
