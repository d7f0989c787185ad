"""An agents' process: sessions that call a server of chat completions at the same time, through one client.

    python -m turns.agent CLIENT URL

CLIENT is `stock` (the openai SDK's own client), `tidegate` (`Session.openai()`) or `raw` (the load
generator's client). For each line on stdin, `whole` or `streamed`, it runs SESSIONS new sessions of TURNS
turns and prints its CPU ms per turn.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI
from turns.load import Load
from turns.material import SYSTEM, TOOL, TURN_TOKENS, question

from tidegate.agents.base import RETRIES, Session

SESSIONS, TURNS = 32, 8


async def episode(llm: AsyncOpenAI, name: str, stream: bool) -> None:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question(name)},
    ]
    for number in range(TURNS):
        arguments: dict[str, Any] = {"model": "m", "messages": messages, "tools": [TOOL]}
        reply = await llm.chat.completions.create(**arguments, max_tokens=TURN_TOKENS, stream=stream)
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
        else:
            text = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"Step {number} is not right yet. Go on."})


async def raw(url: str, names: list[str], stream: bool) -> None:
    sessions = [(name, "/v1/chat/completions", "key") for name in names]
    job = {"url": url, "sessions": sessions, "turns": TURNS, "concurrency": len(names), "stream": stream}
    done = await Load().turns(job)
    if done["errors"]:
        raise RuntimeError(f"{done['errors']} calls failed, first: {done['error']}")


def client_of(kind: str, url: str) -> Callable[[], AsyncOpenAI]:
    """Returns a function that makes the client of one session."""
    if kind == "stock":
        shared = AsyncOpenAI(base_url="http://unset.invalid", api_key="unset", max_retries=RETRIES)
        return lambda: shared.with_options(base_url=f"{url}/v1", api_key="key", timeout=600.0)
    return lambda: Session(f"{url}/v1", "key", "m", None, time.monotonic() + 600).openai()


async def main(kind: str, url: str) -> None:
    new_client = client_of(kind, url)
    for number, line in enumerate(sys.stdin):
        names, stream = [f"{number}.{index}" for index in range(SESSIONS)], line.strip() == "streamed"
        began = time.process_time()
        if kind == "raw":
            await raw(url, names, stream)
        else:
            await asyncio.gather(*(episode(new_client(), name, stream) for name in names))
        print(1e3 * (time.process_time() - began) / (SESSIONS * TURNS), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
