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
UNTRAINED = {"x-tidegate-train": "no"}


class Users:
    """Simulated users, and the feedback that they gave.

    Attributes:
        thumbs: The accepted feedback, by the group of its conversation.
        recent: Whether the last 200 answers were right.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.llm = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        self.headers = {"Authorization": f"Bearer {key}"}
        self.numbers = itertools.count()
        self.recent: deque[float] = deque(maxlen=200)
        self.thumbs: dict[str, float] = {}

    async def run(self) -> None:
        """Ask until cancelled."""
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
            if number % 500 == 499:
                share = sum(self.recent) / len(self.recent)
                told = f"{number + 1} questions, {len(self.thumbs)} thumbs"
                print(f"{told}; {share:.0%} of the last 200 right", flush=True)
            if rng.random() >= SILENT:
                group.create_task(self.thumb(reply, right, rng.uniform(0, LONGEST_S)))

    async def thumb(self, reply: str, right: float, delay_s: float) -> None:
        """Send feedback, again if the connection fails: a repeated one counts once."""
        await asyncio.sleep(delay_s)
        body = {"id": reply, "value": "up" if right else "down"}
        while True:
            try:
                async with self.http.post(f"{self.url}/v1/feedback", json=body) as response:
                    response.raise_for_status()
                    self.thumbs[(await response.json())["group"]] = right
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.5)

    async def evaluate(self, questions: int) -> float:
        """Return the share of right answers to held-out questions, which are not trained on."""
        llm = self.llm.with_options(default_headers=UNTRAINED)
        tasks = Arithmetic().eval_sets()[""]
        slots = asyncio.Semaphore(USERS)

        async def ask(number: int) -> float:
            async with slots:
                text, _ = await answer(llm, tasks[number].messages[0]["content"])
                return exact_answer(text, tasks[number].answer)

        return sum(await asyncio.gather(*map(ask, range(questions)))) / questions


if __name__ == "__main__":
    asyncio.run(Users(*sys.argv[1:]).run())
