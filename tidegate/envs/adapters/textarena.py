"""Games of TextArena against themselves or an opponent: `env.use = "textarena:GuessTheNumber-v0"`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tidegate.envs.adapters.games import Games
from tidegate.envs.adapters.library import require
from tidegate.envs.base import Done
from tidegate.envs.rewards import Grade
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean, load_object
from tidegate.types import Message

_MOVE = re.compile(r"\[[^\[\]\s]+\]")

Opponent = Callable[[str, random.Random], str]
"""`opponent(observation, random)` returns the other player's action."""


@dataclass(slots=True)
class ArenaGame:
    """One game. TextArena draws from Python's global generator; each game has a state of it of its own."""

    env: Any
    player: int
    randomness: Any = None
    shown: str = ""
    """Everything that the agent has seen of an observation that grows."""
    opponent_random: random.Random = field(default_factory=random.Random)
    result: tuple[Any, Any] | None = None

    @contextmanager
    def randomly(self) -> Iterator[None]:
        """Puts the game's state into the global generator for the duration of a block."""
        outside = random.getstate()
        if self.randomness is not None:
            random.setstate(self.randomness)
        try:
            yield
        finally:
            self.randomness = random.getstate()
            random.setstate(outside)

    def grade(self) -> Grade:
        rewards, infos = self.result or (None, None)
        info = (infos or {}).get(self.player, {})
        metrics = {
            "game_ended": float(self.result is not None),
            "game_turns": float(info.get("turn_count") or 0),
            "game_invalid_move": float(bool(info.get("invalid_move"))),
        }
        return Grade(float((rewards or {}).get(self.player, 0.0)), metrics)

    def close(self) -> None:
        """Does nothing: a game holds memory only."""


class TextArena(Games):
    """Plays a game of TextArena; the reward is the player's by the game's own rules, 0 if it did not end.

    Args:
        id: Name of the game, such as `GuessTheNumber-v0`.
        make: Arguments of the game's constructor.
        players: Number of players.
        player: Number of the agent's player; the opponent plays all others.
        opponent: `random`: a move in brackets that the observation's last line with moves lists; or
            `file.py:function`, called with the observation and a `random.Random`.
        prompt: Template of the prompt, with `{observation}`.
        system: System message before the prompt; empty: none.
        held_out: Number of held-out tasks. Their seeds never occur in training.
        seed: Determines the seeds of the tasks.

    Raises:
        ConfigError: The library is missing, or it has no such game, or not for so many players.
    """

    name: ClassVar[str] = "textarena"

    def __init__(
        self,
        id: str,
        *,
        make: Mapping[str, Any] | None = None,
        players: int = 1,
        player: int = 0,
        opponent: str = "random",
        prompt: str = "{observation}",
        system: str = "",
        held_out: int = 100,
        seed: int = 0,
    ) -> None:
        self._arena = require("textarena", "textarena")
        games = self._arena.envs.registration.ENV_REGISTRY
        if id not in games:
            raise ConfigError(f"textarena has no game {id!r}{did_you_mean(id, games)}")
        if not 0 <= player < players:
            raise ConfigError(f"textarena:{id}: player = {player} is not one of {players} players")
        self._make, self._players, self._player = dict(make or {}), players, player
        self._opponent: Opponent = (
            random_move if opponent == "random" else load_object(opponent, {}, "opponent")
        )
        super().__init__(id, held_out, seed, prompt, system)
        try:
            self.start(0)
        except (AssertionError, TypeError, LookupError, ImportError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"textarena:{id} cannot be started for {players} players (option 'players'): {cause}"
            ) from error

    def start(self, seed: int) -> tuple[ArenaGame, str]:
        game = ArenaGame(self._arena.make(self._id, **self._make), self._player)
        game.opponent_random.seed(seed)
        with game.randomly():
            random.seed(seed)
            game.env.reset(num_players=self._players, seed=seed)
            observation = self._advance(game, False)
        return game, observation or ""

    async def respond(self, state: ArenaGame, reply: Message) -> Message | str | Done:
        action = str(reply.get("content") or "")
        with state.randomly():
            done, _ = state.env.step(action=action)
            observation = self._advance(state, done)
        return Done() if observation is None else _without_echo(observation, action)

    def _advance(self, game: ArenaGame, done: bool) -> str | None:
        """Plays the opponent's moves; returns what is new to the agent, None if the game is over."""
        while not done:
            player, observation = game.env.get_observation()
            text = observation if isinstance(observation, str) else _joined(observation)
            if player == self._player:
                new = text.removeprefix(game.shown) or text
                game.shown = text
                return new.strip("\n")
            done, _ = game.env.step(action=self._opponent(text, game.opponent_random))
        game.result = game.env.close()
        return None


def random_move(observation: str, generator: random.Random) -> str:
    """Returns one of the moves in brackets in the last line of the observation that lists several."""
    lines = [_MOVE.findall(line) for line in observation.splitlines()]
    listed = [moves for moves in lines if len(moves) > 1]
    if not listed:
        raise ValueError("the opponent 'random' finds no line of moves in brackets: set env.options.opponent")
    return str(generator.choice(listed[-1]))


def _joined(observation: Any) -> str:
    """Returns the observations of a game without wrappers as a text."""
    return "\n".join(str(message) for _, message, _ in observation)


def _without_echo(observation: str, action: str) -> str:
    """Returns an observation without the player's own action at its start."""
    for echo in (action, f"[{action}]"):
        match = re.match(rf"\[[^\]]*\] {re.escape(echo)}\n", observation)
        if match is not None:
            return observation[match.end() :]
    return observation
