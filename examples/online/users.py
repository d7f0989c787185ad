"""Simulated users of the service: they ask, and give a thumb some seconds later; some never do.

python examples/online/users.py http://127.0.0.1:8000 KEY
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections import deque

import aiohttp
from openai import AsyncOpenAI
from service import answer

from tidegate.envs.arithmetic import Arithmetic, exact_answer

USERS = 40
SILENT = 0.2
"""Share of the conversations without feedback."""
LONGEST_S = 5.0
"""Longest time until a thumb."""


class Users:
    """What the users do, and how content they are."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.llm = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=8)
        self.headers = {"Authorization": f"Bearer {key}"}
        self.numbers = itertools.count()
        self.recent: deque[float] = deque(maxlen=200)
        self.thumbs = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession(headers=self.headers) as self.http, asyncio.TaskGroup() as group:
            for number in range(USERS):
                group.create_task(self.user(random.Random(number), group))

    async def user(self, rng: random.Random, group: asyncio.TaskGroup) -> None:
        while True:
            number = next(self.numbers)
            task = Arithmetic().train_task(number)
            text, reply = await answer(self.llm, task.messages[0]["content"])
            right = exact_answer(text, task.answer)
            self.recent.append(right)
            if number % 200 == 199:
                share = sum(self.recent) / len(self.recent)
                print(
                    f"{number + 1} questions, {self.thumbs} thumbs; {share:.0%} of the last 200 right",
                    flush=True,
                )
            if rng.random() >= SILENT:
                group.create_task(self.thumb(reply, "up" if right else "down", rng.uniform(0, LONGEST_S)))

    async def thumb(self, reply: str, value: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with self.http.post(f"{self.url}/v1/feedback", json={"id": reply, "value": value}) as response:
            response.raise_for_status()
        self.thumbs += 1


if __name__ == "__main__":
    asyncio.run(Users(*sys.argv[1:]).run())
