"""The self-play demo's game and agent: seats, chats, held-out starts, and illegal moves beside the reward."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("textarena")

from examples.selfplay import agent as selfplay_agent
from examples.selfplay import env as selfplay
from tidegate.envs.base import Done
from tidegate.envs.rewards import Grade
from tidegate.types import TaskView

NIM = selfplay.Nim()


async def played(task: Any, *moves: str) -> tuple[list[Any], Grade]:
    """What the game says to each move, and the grade."""
    state = await NIM.setup(task)
    said = [await NIM.respond(state, {"role": "assistant", "content": move}) for move in moves]
    return said, selfplay.result(state)


def test_seats_alternate_and_a_task_has_one_start_and_one_seat() -> None:
    tasks = [NIM.train_task(index) for index in range(400)]
    assert [task.info["policies"].index("player") for task in tasks[:4]] == [0, 1, 0, 1]
    assert [task.messages[0]["policy"] for task in tasks[:2]] == ["player", "opponent"]
    held_out = NIM.eval_sets()[""]
    assert {tuple(task.info["piles"]) for task in held_out}.isdisjoint(tuple(t.info["piles"]) for t in tasks)
    assert {frozenset(task.info["policies"]) for task in held_out} == {frozenset(("player", "base"))}
    assert len({task.id for task in [*tasks, *held_out]}) == len(tasks) + len(held_out) == 600


@pytest.mark.parametrize(("seat", "reward"), [(0, 1.0), (1, 0.0)])
async def test_the_reward_is_that_of_the_players_seat(seat: int, reward: float) -> None:
    task = NIM.task("one", (1, 1, 1), seat, "opponent")
    said, grade = await played(task, "[0 1]", "[1 1]", "[2 1]")
    assert said[0]["policy"] == ("opponent" if seat == 0 else "player")
    assert said[0]["content"].endswith("pile 0: 0\n  pile 1: 1\n  pile 2: 1")
    assert said[2] == Done()
    assert grade.value == reward
    assert grade.metrics["illegal_moves"] == 0
    # 1, 1, 1 and 1 are won positions, which the first mover leaves with two equal piles or none.
    assert grade.metrics.get("best_moves") == (1.0 if seat == 0 else None)


async def test_illegal_moves_are_counted_beside_the_reward() -> None:
    task = NIM.task("one", (2, 1, 1), 0, "opponent")
    said, grade = await played(task, "[0 3]", "[0 2]", "[1 1]", "[2 1]")
    assert said[0]["policy"] == "player", "the same player moves again"
    assert "Cannot remove 3 from pile 0" in said[0]["content"]
    assert grade.value == 1.0
    assert grade.metrics == {
        "illegal_moves": 1.0,
        "lost_by_illegal_move": 0.0,
        "won_by_illegal_move": 0.0,
        "best_moves": pytest.approx(2 / 3),
    }


@pytest.mark.parametrize(
    ("moves", "reward", "illegal", "lost", "won"),
    [(("nothing", "[9 9]"), 0.0, 2.0, 1.0, 0.0), (("[0 2]", "nothing", "[0 1]"), 1.0, 0.0, 0.0, 1.0)],
)
async def test_a_game_that_ends_by_an_illegal_move_is_told(
    moves: tuple[str, ...], reward: float, illegal: float, lost: float, won: float
) -> None:
    said, grade = await played(NIM.task("one", (2, 1, 1), 0, "opponent"), *moves)
    assert said[-1] == Done()
    names = ("illegal_moves", "lost_by_illegal_move", "won_by_illegal_move")
    assert (grade.value, *(grade.metrics[name] for name in names)) == (reward, illegal, lost, won)


async def test_each_policy_has_a_chat_of_its_own() -> None:
    task = NIM.task("one", (1, 1, 1), 0, "opponent")
    state, seen = await NIM.setup(task), []

    class Llm:
        async def create(self, *, model: str, messages: list[dict[str, str]]) -> Any:
            seen.append((model, [message["content"].partition("\n")[0] for message in messages]))
            move = f"[{len(seen) - 1} 1]"
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=move))])

    class Session:
        def openai(self) -> Any:
            return SimpleNamespace(chat=SimpleNamespace(completions=Llm()))

        async def respond(self, message: dict[str, str]) -> Any:
            answer = await NIM.respond(state, message)
            return None if answer == Done() else answer

    await selfplay_agent.agent(TaskView(task.id, task.messages), Session())
    assert seen == [
        ("player", ["Welcome to Nim, Player 0!"]),
        ("opponent", ["Welcome to Nim, Player 1!"]),
        ("player", ["Welcome to Nim, Player 0!", "[0 1]", "Current Pile:"]),
    ]


def test_the_base_model_learned_from_legal_moves_alone() -> None:
    base = importlib.import_module("examples.selfplay_base.make")
    games = base.games(base.random.Random(0))
    chats = [next(games) for _ in range(40)]
    assert not any("invalid" in message["content"] for chat in chats for message in chat)
    assert {chat[0]["content"].partition("!")[0][-1] for chat in chats} == {"0", "1"}
