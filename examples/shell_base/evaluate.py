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

from examples.bases.episodes import TOOL_CALL, continuations, load, print_episodes
from examples.shell.env import Shell
from examples.shell_base.make import TOOLS
from tidegate.envs.shell.sandboxed import SandboxEpisode
from tidegate.types import Task

MAX_TURNS, MAX_TOKENS = 6, 40
MAX_CONCURRENCY = 8
"""Sandboxes that work at the same time."""


@dataclass(slots=True)
class Episode:
    task: Task
    state: SandboxEpisode
    ids: list[int]
    texts: list[str]
    over: bool = False


async def map_concurrently(items: Sequence[Any], action: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    """Awaits `action` of each item, of MAX_CONCURRENCY items at a time."""
    semaphore = asyncio.Semaphore(MAX_CONCURRENCY)

    async def run(item: Any) -> Any:
        async with semaphore:
            return await action(item)

    return await asyncio.gather(*map(run, items))


async def play(
    model: Any, tokenizer: Any, tasks: Sequence[Task], greedy: bool
) -> list[tuple[Episode, float]]:
    """Returns the tasks' episodes with their rewards."""
    environment = Shell()
    states = await map_concurrently(tasks, environment.setup)

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
        running = [episode for episode in episodes if not episode.over]
        if not running:
            break
        replies = continuations(model, tokenizer, [episode.ids for episode in running], greedy, MAX_TOKENS)
        for episode, reply in zip(running, replies, strict=True):
            episode.ids += reply
            episode.texts.append(tokenizer.decode(reply))
        await map_concurrently(running, lambda episode: advance(environment, tokenizer, episode))

    async def reward(episode: Episode) -> float:
        grades = await environment.await_rewards(episode.task, None, None, [], episode.state)
        await environment.teardown(episode.state)
        return grades["solved"].value

    return list(zip(episodes, await map_concurrently(episodes, reward), strict=True))


async def advance(environment: Shell, tokenizer: Any, episode: Episode) -> None:
    """Runs the command of the last reply, if there is one."""
    call = TOOL_CALL.search(episode.texts[-1])
    try:
        command = None if call is None else json.loads(call[1])["arguments"]["command"]
    except (ValueError, KeyError, TypeError):
        command = None
    if not isinstance(command, str):
        episode.over = True
        return
    result = await environment.bash(episode.state, command)
    episode.texts.append(result)
    answer = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
    episode.ids += tokenizer.encode(answer + "<|im_start|>assistant\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--show", type=int, default=3, help="failed episodes to print")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    tasks = Shell(held_out=arguments.tasks).eval_sets()[""]
    for mode in ("sampled", "greedy"):
        results = asyncio.run(play(model, tokenizer, tasks, mode == "greedy"))
        kinds = defaultdict(list)
        for episode, reward in results:
            kinds[episode.task.info["kind"]].append(reward)
        means = ", ".join(f"{kind} {sum(values) / len(values):.2f}" for kind, values in sorted(kinds.items()))
        print(f"{mode}: {sum(reward for _, reward in results) / len(results):.3f} ({means})", flush=True)
        failed = [episode.texts for episode, reward in results if reward == 0][: arguments.show]
        print_episodes(failed, [0.0] * len(failed))


if __name__ == "__main__":
    main()
