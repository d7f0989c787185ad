import asyncio
import itertools
import re
import sys

from tidegate.client import Client
from tidegate.envs.arithmetic import Arithmetic, exact_answer
from tidegate.errors import GatewayError

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
TERM = r"(?:[1-9]\d*|\([1-9]\d* [-+*/] [1-9]\d*\))"


def calculator(call):
    expression = re.search(f'"({TERM}(?: [-+*/] {TERM})*)"', call.function.arguments)
    result = f"{eval(expression[1]):g}" if expression else "error"
    return {"role": "tool", "tool_call_id": call.id, "content": result}


async def attempt(group, task):
    async with group.episode() as episode:
        messages, create = list(task.messages), episode.openai().chat.completions.create
        while messages[-1]["role"] != "assistant" and len(messages) < 12:
            message = (await create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
            messages += [message.model_dump(exclude_none=True), *map(calculator, message.tool_calls or [])]
        episode.reward = exact_answer(message.content, task.answer)


async def train(client, tasks):
    for task in tasks:
        async with client.group(task.id) as group:
            await asyncio.gather(*(attempt(group, task) for _ in range(8)))


async def main(url, key):
    async with Client(url, key) as client, asyncio.TaskGroup() as group:
        tasks = map(Arithmetic().train_task, itertools.count())
        for _ in range(32):
            group.create_task(train(client, tasks))


try:
    asyncio.run(main(*sys.argv[1:]))
except* GatewayError as ends:
    print(ends.exceptions[0])
