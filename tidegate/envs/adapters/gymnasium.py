"""Environments of Gymnasium as text: `env.use = "gymnasium:FrozenLake-v1"`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tidegate.envs.adapters.games import Games
from tidegate.envs.adapters.library import require
from tidegate.envs.base import Done
from tidegate.envs.rewards import Grade
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean, load_object
from tidegate.types import Message

ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
}
"""Words for the actions 0, 1, … of known environments; those of other ones are their numbers."""
INVALID_REPLIES = 3
"""Replies without an action, one after the other, that end an episode."""
PROMPT = "{observation}\nActions: {actions}. Reply with one action."
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(slots=True)
class GymGame:
    """One episode of a Gymnasium environment."""

    env: Any
    rewards: float = 0.0
    steps: int = 0
    invalid: int = 0
    ended: bool = False

    def grade(self) -> Grade:
        return Grade(self.rewards, {"game_steps": self.steps, "game_ended": float(self.ended)})

    def close(self) -> None:
        self.env.close()


class Gymnasium(Games):
    """Plays a Gymnasium environment; the reward is the episode's return.

    An observation is the environment's `ansi` rendering if it has one, else the observation's text. The
    environment needs a discrete space of actions, or one of texts.

    Args:
        id: Name of the environment, such as `FrozenLake-v1`.
        make: Arguments of `make` of gymnasium.
        wrapper: `file.py:function` that returns the environment wrapped, for example with spaces of texts.
        actions: Words for the actions 0, 1, ….
        prompt: Template of the prompt, with `{observation}` and `{actions}`.
        system: System message before the prompt; empty: none.
        held_out: Number of held-out tasks. Their seeds never occur in training.
        seed: Determines the seeds of the tasks.

    Raises:
        ConfigError: The library is missing, or it has no such environment, or not one that text can control.
    """

    name: ClassVar[str] = "gymnasium"

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        wrapper: str | None = None,
        actions: Sequence[str] | None = None,
        prompt: str = PROMPT,
        system: str = "",
        held_out: int = 100,
        seed: int = 0,
    ) -> None:
        self._gym = require("gymnasium", "gymnasium")
        if id not in self._gym.registry:
            raise ConfigError(f"gymnasium has no environment {id!r}{did_you_mean(id, self._gym.registry)}")
        self._make = dict(make or {})
        creator = self._gym.spec(id).entry_point
        cls = self._gym.envs.registration.load_env_creator(creator) if isinstance(creator, str) else creator
        if "ansi" in getattr(cls, "metadata", {}).get("render_modes", ()):
            self._make.setdefault("render_mode", "ansi")
        self._wrap = None if wrapper is None else load_object(wrapper, {}, "wrapper")
        self._actions = self._named(id, actions)
        super().__init__(id, held_out, seed, prompt.replace("{actions}", ", ".join(self._actions)), system)

    def start(self, seed: int) -> tuple[GymGame, str]:
        env = self._made(self._id)
        observation, _ = env.reset(seed=seed)
        return GymGame(env), self._text(env, observation)

    async def respond(self, state: GymGame, reply: Message) -> Message | str | Done:
        action = self.action(str(reply.get("content") or ""))
        if action is None:
            state.invalid += 1
            if state.invalid >= INVALID_REPLIES:
                return Done()
            return f"There is no action in the reply. Actions: {', '.join(self._actions)}."
        state.invalid = 0
        observation, reward, terminated, truncated, _ = state.env.step(action)
        state.rewards += float(reward)
        state.steps += 1
        state.ended = bool(terminated or truncated)
        return Done() if state.ended else self._text(state.env, observation)

    def action(self, reply: str) -> Any:
        """Returns the action that a reply names last; None if it names none."""
        if not self._actions:
            return reply
        words = "|".join(map(re.escape, sorted(self._actions, key=len, reverse=True)))
        found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", reply, re.IGNORECASE)
        return self._first + self._actions.index(found[-1].lower()) if found else None

    def _made(self, id: str) -> Any:
        env = self._gym.make(id, **self._make)
        return env if self._wrap is None else self._wrap(env)

    def _named(self, id: str, actions: Sequence[str] | None) -> list[str]:
        """Returns the words for the actions; none if the actions are texts."""
        try:
            env = self._made(id)
        except (TypeError, ValueError, self._gym.error.Error) as error:
            raise ConfigError(f"gymnasium:{id} cannot be made: {type(error).__name__}: {error}") from error
        space, spaces = env.action_space, self._gym.spaces
        env.close()
        if isinstance(space, spaces.Text):
            return []
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"gymnasium:{id} has the action space {space}; text can name the actions of a Discrete or "
                "Text space only: set env.options.wrapper to a function that wraps the environment"
            )
        self._first = int(space.start)
        numbers = [str(self._first + n) for n in range(int(space.n))]
        words = actions or ACTIONS.get(id.partition("-")[0]) or numbers
        if len(words) != len(numbers):
            raise ConfigError(f"gymnasium:{id} has {len(numbers)} actions, but actions names {len(words)}")
        return [word.lower() for word in words]

    def _text(self, env: Any, observation: Any) -> str:
        rendered = env.render() if env.render_mode == "ansi" else observation
        return _COLOUR.sub(_marked, str(rendered)).strip("\n")


def _marked(colour: re.Match[str]) -> str:
    """Returns the mark for a terminal's colour: brackets around the coloured position."""
    return "]" if colour.group() == "\x1b[0m" else "["
