"""The same episodes through Tidegate's adapters and by each library's own runner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tidegate.envs.base import Done, Environment, load_environment
from tidegate.types import Message, Task

EPISODES = 200
LIMIT = 200
"""Turns of an episode at most."""
PEERS = Path(__file__).with_name("peers")
"""Environments of verifiers, and servers of OpenEnv and MCP, that need no download."""
Policy = Callable[[random.Random, str], "str | Message"]
"""`policy(random, observation)` returns the agent's reply."""


async def through_tidegate(environment: Environment, task: Task, policy: Policy) -> float:
    """Plays an episode as a gateway and the agent `chat` do; returns its reward."""
    generator = random.Random(task.id)
    state = await environment.setup(task)
    messages: list[Message] = list(task.messages)
    try:
        for _ in range(LIMIT):
            reply = policy(generator, messages[-1]["content"])
            messages.append({"role": "assistant", "content": reply} if isinstance(reply, str) else reply)
            if calls := messages[-1].get("tool_calls"):
                messages += [await _called(environment, state, call) for call in calls]
                continue
            answer = await environment.respond(state, messages[-1])
            if isinstance(answer, Done):
                break
            messages.append({"role": "user", "content": answer} if isinstance(answer, str) else answer)
        output = next(one["content"] for one in reversed(messages) if one["role"] == "assistant")
        awaited = await environment.await_rewards(task, None, output, messages, state)
        return environment.score(task, None, output, messages, state, awaited).reward
    finally:
        await environment.teardown(state)


async def _called(environment: Environment, state: Any, call: Any) -> Message:
    tool = next(tool for tool in environment.tools() if tool.name == call["function"]["name"])
    result = await tool.fn(state, json.loads(call["function"]["arguments"]))
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def tidegate_scores(environment: Environment, policy: Policy, number: int) -> list[tuple[Task, float]]:
    """Rewards of `number` episodes, eight at a time: half on held-out tasks, half on training tasks."""
    held_out = list(environment.eval_sets()[""])[: number // 2]
    tasks = held_out + [environment.train_task(index) for index in range(number - len(held_out))]

    async def play() -> list[float]:
        free = asyncio.Semaphore(8)

        async def one(task: Task) -> float:
            async with free:
                return await through_tidegate(environment, task, policy)

        return list(await asyncio.gather(*map(one, tasks)))

    return list(zip(tasks, asyncio.run(play()), strict=True))


def reasoning_gym(number: int = EPISODES) -> list[tuple[float, float]]:
    """Scores of right and damaged answers: (Tidegate's, the library's)."""
    import reasoning_gym as library
    from reasoning_gym.utils import extract_answer

    environment = load_environment("reasoning_gym:spell_backward", {"held_out": number // 2})
    golds = {task.id: str(task.answer) for task in environment.eval_sets()[""]}

    def damaged(generator: random.Random, question: str) -> str:
        word = question.rpartition(" ")[2][::-1]
        kind = generator.randrange(4)
        if kind == 0:
            return f"I think so.\n<answer> {word} </answer>"
        if kind == 1:
            return word
        letters = list(word)
        letters[generator.randrange(len(letters))] = "x"
        return f"<answer>{''.join(letters[: 2 + 4 * kind])}</answer>"

    pairs = []
    data = library.create_dataset("spell_backward", seed=0, size=1)
    for task, score in tidegate_scores(environment, damaged, number):
        word = str(task.answer)[::-1]
        entry = {"question": task.messages[-1]["content"], "answer": task.answer, "metadata": {"word": word}}
        reply = damaged(random.Random(task.id), task.messages[-1]["content"])
        pairs.append((score, float(data.score_answer(extract_answer(reply), entry))))
    assert len(golds) == number // 2
    return pairs


def gymnasium(number: int = EPISODES) -> list[tuple[float, float]]:
    """Returns of random play of three games: (Tidegate's, the library's)."""
    import gymnasium as library

    from tidegate.envs.adapters.gymnasium import ACTIONS

    pairs = []
    for id, episodes in (
        ("FrozenLake-v1", number // 2),
        ("Blackjack-v1", number // 4),
        ("Taxi-v4", number // 4),
    ):
        names = ACTIONS[id.partition("-")[0]]

        def anywhere(generator: random.Random, _observation: str, names: Any = names) -> str:
            return f"I choose {generator.choice(names)}."

        environment = load_environment(f"gymnasium:{id}", {"held_out": episodes // 2})
        for task, score in tidegate_scores(environment, anywhere, episodes):
            generator = random.Random(task.id)
            env = library.make(id)
            env.reset(seed=task.info["seed"])
            total, ended = 0.0, False
            while not ended:
                action = names.index(anywhere(generator, "").split()[-1][:-1])
                _, reward, terminated, truncated, _ = env.step(action)
                total, ended = total + float(reward), bool(terminated or truncated)
            env.close()
            pairs.append((score, total))
    return pairs


def textarena(number: int = EPISODES) -> list[tuple[float, float]]:
    """Rewards of guesses, and of games of tic-tac-toe against the random opponent."""
    import textarena as library

    from tidegate.envs.adapters.textarena import random_move

    def guess(generator: random.Random, _observation: str) -> str:
        return f"[{generator.randrange(0, 22)}]"

    def place(generator: random.Random, _observation: str) -> str:
        return f"[{generator.randrange(9)}]"

    pairs = []
    for id, players, policy in (("GuessTheNumber-v0", 1, guess), ("TicTacToe-v0", 2, place)):
        options: dict[str, Any] = {"held_out": number // 4, "players": players}
        environment = load_environment(f"textarena:{id}", options)
        for task, score in tidegate_scores(environment, policy, number // 2):
            generator, opponent = random.Random(task.id), random.Random(task.info["seed"])
            env = library.make(id)
            random.seed(task.info["seed"])
            env.reset(num_players=players, seed=task.info["seed"])
            done = False
            while not done:
                player, observation = env.get_observation()
                action = policy(generator, observation) if player == 0 else random_move(observation, opponent)
                done, _ = env.step(action=action)
            rewards, _ = env.close()
            pairs.append((score, float(rewards[0])))
    return pairs


def verifiers(number: int = EPISODES) -> list[tuple[float, float]]:
    """Rewards of a single-turn, a multi-turn and a tool environment."""
    if str(PEERS) not in sys.path:
        sys.path.insert(0, str(PEERS))
    import verifiers as library
    from verifiers.clients import OpenAIChatCompletionsClient

    from tidegate.envs.adapters.verifiers import as_response
    from tidegate.envs.adapters.verifiers_rows import row_of

    class Scripted(OpenAIChatCompletionsClient):
        def __init__(self, policy: Policy, task: Task) -> None:
            super().__init__(None)
            self.policy, self.generator = policy, random.Random(task.id)

        async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Any:
            reply = self.policy(self.generator, prompt[-1]["content"])
            message = {"content": reply} if isinstance(reply, str) else reply
            return as_response(library.types, message, model)

    def mirrored(generator: random.Random, word: str) -> str:
        return word[::-1] if generator.random() < 0.5 else "".join(generator.choices(word, k=3))

    def guess(generator: random.Random, _observation: str) -> str:
        return generator.choice("0123456789")

    def added(generator: random.Random, observation: str) -> str | Message:
        if "=" not in observation:
            return observation if generator.random() < 0.7 else "0"
        a, _, b, *_ = observation.split()
        call = {"name": "add", "arguments": json.dumps({"a": int(a), "b": int(b)})}
        return {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "call", "type": "function", "function": call}],
        }  # fmt: skip

    pairs = []
    parts: tuple[tuple[str, Policy, int], ...] = (
        ("mirror-words", mirrored, number // 2),
        ("guess-digit", guess, number // 4),
        ("adding-tool", added, number // 4),
    )
    for id, policy, episodes in parts:
        environment: Any = load_environment(f"verifiers:{id}", {"held_out": episodes // 2})
        theirs = library.load_environment(id)
        for task, score in tidegate_scores(environment, policy, episodes):
            row = row_of(theirs, task.id)
            rollout = theirs.run_rollout(row, Scripted(policy, task), "policy", {})
            pairs.append((score, float(asyncio.run(rollout)["reward"])))
    return pairs


@contextlib.contextmanager
def openenv_server() -> Iterator[str]:
    """Runs the OpenEnv server of `peers`; gives its address."""
    command = [sys.executable, str(PEERS / "openenv_server.py")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait(10)


def openenv(number: int = EPISODES) -> list[tuple[float, float]]:
    """Rewards of random letters on a real server, by its own client and through Tidegate."""
    from openenv import GenericEnvClient

    def letter(generator: random.Random, _observation: str) -> str:
        return generator.choice("abcdefgh")

    async def theirs(url: str, task: Task) -> float:
        generator, total = random.Random(task.id), 0.0
        async with GenericEnvClient(base_url=url) as client:
            result = await client.reset(seed=task.info["seed"])
            while not result.done:
                result = await client.step({"text": letter(generator, "")})
                total += result.reward or 0.0
        return total

    with openenv_server() as url:
        environment = load_environment(f"openenv:{url}", {"held_out": number // 2, "tasks": number})
        played = tidegate_scores(environment, letter, number)
        return [(score, asyncio.run(theirs(url, task))) for task, score in played]


SCORES = {
    "verifiers": verifiers,
    "reasoning_gym": reasoning_gym,
    "textarena": textarena,
    "gymnasium": gymnasium,
    "openenv": openenv,
}


def equal_scores(library: str) -> None:
    """Asserts that 200 episodes score the same through Tidegate as by the library, and not all alike."""
    pairs = SCORES[library]()
    assert len(pairs) == EPISODES
    assert [(ours, theirs) for ours, theirs in pairs if ours != theirs] == []
    assert len({ours for ours, _ in pairs}) > 1
