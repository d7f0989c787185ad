"""Nim by TextArena's rules. Which policy plays which seat is a part of the task."""

from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import xor
from random import Random
from typing import Any

from tidegate.envs.adapters.library import require
from tidegate.envs.base import Done, Environment
from tidegate.envs.rewards import Grade, Reward
from tidegate.types import Task

PILES, LARGEST = 2, 5
STARTS = list(product(range(1, LARGEST + 1), repeat=PILES))
HELD_OUT = set(Random(0).sample(STARTS, 5))


@dataclass
class Match:
    """A game in progress."""

    game: Any
    policies: list[str]
    """By seat; seat 0 moves first."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def piles(self) -> list[int]:
        return list(self.game.state.game_state["piles"])

    def observation(self) -> dict[str, str]:
        """The messages that are new to the next mover: rules, an objection to its move, the board."""
        seat, new = self.game.get_observation()
        told = [text for _, text, kind in new if kind.name in ("PROMPT", "GAME_ADMIN")]
        board = [text for _, text, kind in new if kind.name == "GAME_BOARD"][-1]
        return {"role": "user", "policy": self.policies[seat], "content": "\n".join([*told, board])}

    def move(self, action: str) -> bool:
        """Plays a move; returns whether the game is over. An illegal move may be repeated once."""
        mover, before = self.policies[self.game.state.current_player_id], self.piles
        over, _ = self.game.step(action=action)
        winning = reduce(xor, before) != 0  # the mover wins from here by leaving 0 at each of its moves
        self.counts[f"{mover} illegal"] += self.piles == before
        self.counts[f"{mover} winning"] += winning
        self.counts[f"{mover} best"] += winning and reduce(xor, self.piles) == 0
        return bool(over)


def result(state: Match) -> Grade:
    """1 for a game that the player won, 0 for a lost one, 0.5 for a draw, which Nim does not have."""
    points, infos = state.game.close()
    seat, counts = state.policies.index("player"), state.counts
    metrics = {
        "illegal_moves": float(counts["player illegal"]),
        "lost_by_illegal_move": float(infos[seat]["invalid_move"]),
        "won_by_illegal_move": float(infos[1 - seat]["invalid_move"]),
    }
    if counts["player winning"]:
        metrics["best_moves"] = counts["player best"] / counts["player winning"]
    return Grade((points[seat] + 1) / 2 if points else 0.0, metrics)


class Nim(Environment):
    """Two policies play: in training `player` and `opponent`, in evaluations `player` and `base`."""

    name = "nim"
    rewards = (Reward("result", result),)

    def __init__(self) -> None:
        self._arena = require("textarena", "textarena")
        self._training = sorted(set(STARTS) - HELD_OUT)

    def train_task(self, index: int) -> Task:
        start = Random(f"nim/{index}").choice(self._training)
        return self.task(f"{index}", start, index % 2, "opponent")

    def eval_sets(self) -> dict[str, list[Task]]:
        games = product(range(20), sorted(HELD_OUT), (0, 1))
        return {"": [self.task(f"eval-{number}", start, seat, "base") for number, start, seat in games]}

    def task(self, id: str, start: tuple[int, ...], seat: int, other: str) -> Task:
        """The same start, seats and opponent for all episodes of a group, so that they can be compared."""
        info = {"piles": list(start), "policies": ["player", other] if seat == 0 else [other, "player"]}
        id = f"{id}-{'-'.join(map(str, start))}-seat-{seat}"
        return Task(id, self.name, [self.match(info).observation()], info=info)

    def match(self, info: Any) -> Match:
        game = self._arena.make("Nim-v0-raw", piles=list(info["piles"]))
        game.reset(num_players=2)
        return Match(game, list(info["policies"]))

    async def setup(self, task: Task) -> Match:
        match = self.match(task.info)
        match.observation()  # the task's own message
        return match

    async def respond(self, state: Match, reply: Any) -> Any:
        return Done() if state.move(reply["content"]) else state.observation()
