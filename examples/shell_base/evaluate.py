"""Evaluates a model on the shell environment without the gateway: `evaluate MODEL_DIR [--tasks 200]`.

`python -m examples.shell_base.evaluate` runs episodes in batches with plain `generate`, in real sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bases.episodes import TOOL_CALL, continuations, load, show
from examples.shell_base.make import TOOLS
from tidegate.envs.shell.sandboxed import SandboxEpisode
from tidegate.envs.shell.shell import Shell
from tidegate.types import Task

MAX_TURNS, MAX_TOKENS = 6, 40
AT_ONCE = 8
"""Sandboxes that work at the same time."""


@dataclass(slots=True)
class Episode:
    task: Task
    state: SandboxEpisode
    ids: list[int]
    texts: list[str]
    over: bool = False


async def each(items: Sequence[Any], act: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    """Awaits `act` of each item, of AT_ONCE items at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(item: Any) -> Any:
        async with room:
            return await act(item)

    return await asyncio.gather(*map(one, items))


async def play(
    model: Any, tokenizer: Any, tasks: Sequence[Task], greedy: bool
) -> list[tuple[Episode, float]]:
    """Returns the tasks' episodes with their rewards."""
    environment = Shell()
    states = await each(tasks, environment.setup)

    def prompt(task: Task) -> list[int]:
        messages = list(task.messages)
        return tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
        )

    episodes = [
        Episode(task, state, prompt(task), [str(task.messages[0]["content"])])
        for task, state in zip(tasks, states, strict=True)
    ]
    for _ in range(MAX_TURNS):
        live = [one for one in episodes if not one.over]
        if not live:
            break
        replies = continuations(model, tokenizer, [one.ids for one in live], greedy, MAX_TOKENS)
        for one, reply in zip(live, replies, strict=True):
            one.ids += reply
            one.texts.append(tokenizer.decode(reply))
        await each(live, lambda one: advance(environment, tokenizer, one))

    async def reward(one: Episode) -> float:
        grades = await environment.await_rewards(one.task, None, None, [], one.state)
        await environment.teardown(one.state)
        return grades["solved"].value

    return list(zip(episodes, await each(episodes, reward), strict=True))


async def advance(environment: Shell, tokenizer: Any, one: Episode) -> None:
    """Runs the command of the last reply, if it has one."""
    call = TOOL_CALL.search(one.texts[-1])
    try:
        command = None if call is None else json.loads(call[1])["arguments"]["command"]
    except (ValueError, KeyError, TypeError):
        command = None
    if not isinstance(command, str):
        one.over = True
        return
    result = await environment.bash(one.state, command)
    one.texts.append(result)
    answer = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
    one.ids += tokenizer.encode(answer + "<|im_start|>assistant\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--show", type=int, default=3, help="failed episodes to print")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    tasks = Shell(held_out=arguments.tasks).eval_sets()[""]
    for how in ("sampled", "greedy"):
        played = asyncio.run(play(model, tokenizer, tasks, how == "greedy"))
        kinds = defaultdict(list)
        for episode, reward in played:
            kinds[episode.task.info["kind"]].append(reward)
        means = ", ".join(f"{kind} {sum(all_) / len(all_):.2f}" for kind, all_ in sorted(kinds.items()))
        print(f"{how}: {sum(reward for _, reward in played) / len(played):.3f} ({means})", flush=True)
        failed = [episode.texts for episode, reward in played if reward == 0][: arguments.show]
        show(failed, [0.0] * len(failed))


if __name__ == "__main__":
    main()
