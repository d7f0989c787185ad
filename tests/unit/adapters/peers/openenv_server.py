"""An OpenEnv server: the letter after the shown one is to be named, twice.

`python openenv_server.py` listens on a free port and prints its address.
"""

from __future__ import annotations

import random
import socket
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

LETTERS = "abcdefgh"


class Reply(Action):
    text: str


class Letter(Observation):
    text: str


class Letters(Environment):
    """Shows a letter; each reply with the letter after it is worth 1/2, and there are two of them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._random, self._letter, self._steps = random.Random(0), "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Letter:
        self._random, self._steps = random.Random(seed), 0
        self._letter = self._random.choice(LETTERS)
        return Letter(text=self._letter)

    def step(self, action: Reply, timeout_s: float | None = None, **kwargs: Any) -> Letter:
        right = LETTERS[(LETTERS.index(self._letter) + 1) % len(LETTERS)]
        self._steps += 1
        reward = 0.5 * (action.text.strip() == right)
        self._letter = self._random.choice(LETTERS)
        return Letter(text=self._letter, reward=reward, done=self._steps == 2)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(Letters, Reply, Letter, env_name="letters", max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
