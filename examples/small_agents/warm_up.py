"""Writes the chats of a warm-up: `python examples/small_agents/warm_up.py search|calculator`.

They show the form of an episode: a call, its result, an answer. Queries, answers and expressions are drawn
at random; which ones are right is left to training.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tidegate.agents.calculator import calculate
from tidegate.agents.search_tools import SEARCH
from tidegate.agents.solver import TOOLS
from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment

CHATS = 32


def search(question: str, rng: Random, passages: Sequence[str]) -> tuple[str, str, str]:
    """Returns some words of the question, another passage, and one of its words."""
    words = re.findall(r"\w+", question)
    start = rng.randrange(len(words) - 2)
    found = rng.choice(passages)
    answer = rng.choice(re.findall(r"\w{4,}", found))
    return " ".join(words[start : start + rng.randint(2, 8)]), found, f"<answer>{answer}</answer>"


def calculator(question: str, rng: Random, _: Sequence[str]) -> tuple[str, str, str]:
    """Returns the question's numbers joined by any operators, the result, and the result as the answer."""
    first, *others = re.findall(r"\d+", question)
    expression = first + "".join(f" {rng.choice('+-*/')} {number}" for number in others)
    result = calculate(expression)
    return expression, result, f"#### {result}"


def chats(settings: Settings, kind: str) -> list[dict[str, Any]]:
    environment = load_environment(settings.env.use, settings.env.options)
    tool, make = (SEARCH, search) if kind == "search" else (TOOLS[0], calculator)
    name = tool["function"]["name"]
    (argument,) = tool["function"]["parameters"]["required"]
    passages = [
        json.loads(line)["text"]
        for line in Path(__file__).with_name("train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rng, made = Random(0), []
    system = {"role": "system", "content": settings.agent.options["instructions"]}
    for index in range(CHATS):
        messages = environment.train_task(index).messages
        value, result, answer = make(str(messages[-1]["content"]), rng, passages)
        function = {"name": name, "arguments": json.dumps({argument: value})}
        call = {"id": "1", "type": "function", "function": function}
        made.append(
            {
                "messages": [
                    system,
                    *messages,
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": result},
                    {"role": "assistant", "content": answer},
                ],
                "tools": [tool],
            }
        )
    return made


def main(kind: str) -> None:
    settings = load_settings(Path(__file__).with_name(f"{kind}.toml"), [])
    lines = [json.dumps(chat) + "\n" for chat in chats(settings, kind)]
    settings.sft.chats[0].parent.mkdir(exist_ok=True)
    settings.sft.chats[0].write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
