"""Agents with tools on a real language model: `make demo-passages` and `make demo-stories`, or
`python examples/small_agents/demo.py search|calculator [--section.key value ...]`.

Fetches SmolLM2 (and, for `search`, the encoder MiniLM, with which it indexes and serves the passages), writes
the warm-up's chats, fine-tunes on them and trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tidegate.agents.calculator import calculate
from tidegate.agents.search_tools import SEARCH
from tidegate.agents.solver import TOOLS
from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.errors import StartError, TidegateError
from tidegate.rag.client import SearchClient
from tidegate.service.service import Service

HERE = Path(__file__).parent
TEMPLATE = HERE.parent / "tiny_base" / "model" / "chat_template.jinja"
CHATS = 48


def tidegate(*arguments: str) -> None:
    """Raises StartError if a command fails; its own output says why."""
    command = [sys.executable, "-m", "tidegate", *arguments]
    if subprocess.run(command, check=False, timeout=3600).returncode:
        raise StartError(f"this command failed: {' '.join(command)}")


def prepare_model(model: Path) -> None:
    """Writes SmolLM2 with a chat template that has tools, which its own has not."""
    plain = model.with_name("smollm2")
    if not plain.is_dir():
        tidegate("convert", "smollm2", "--out", str(plain))
    if not model.is_dir():
        shutil.copytree(plain, model)
        shutil.copy(TEMPLATE, model / TEMPLATE.name)


@contextlib.contextmanager
def serve_passages(build: Path, directory: Path) -> Iterator[str]:
    """Indexes the passages and runs a retrieval server; yields its URL."""
    encoder, index = build / "minilm", build / "small-agents-index"
    if not encoder.is_dir():
        tidegate("convert", "minilm", "--out", str(encoder))
    passages = str(HERE / "passages.jsonl")
    tidegate("rag", "build", passages, "--out", str(index), "--encoder", str(encoder), "--replace")
    server = Service("rag", lambda: ["serve", str(index)], directory)
    with asyncio.Runner() as runner:
        try:
            yield runner.run(server.start())
        finally:
            runner.run(server.stop())


def write_chats(settings: Settings) -> None:
    """Writes the warm-up's chats: a call, its result, an answer.

    They show the form of an episode. Queries are parts of the question, answers are any word of the passage
    that was found, and operators are drawn at random: training has to learn which are right.
    """
    environment = load_environment(settings.env.use, settings.env.options)
    rng, lines = Random(0), []
    system = {"role": "system", "content": settings.agent.options["instructions"]}
    for index in range(CHATS):
        question = environment.train_task(index).messages
        text = str(question[-1]["content"])
        if settings.agent.use == "search":
            tool, answer = SEARCH, "<answer>{}</answer>"
            argument = _part(text, rng)
            result = asyncio.run(_find(settings.agent.options, argument))
            found = rng.choice(re.findall(r"\w{4,}", result))
        else:
            tool, answer = TOOLS[0], "#### {}"
            first, *others = numbers_in(text)
            argument = first + "".join(f" {rng.choice('+-*/')} {number}" for number in others)
            found = result = calculate(argument)
        (parameter,) = tool["function"]["parameters"]["required"]
        function = {"name": tool["function"]["name"], "arguments": json.dumps({parameter: argument})}
        messages: list[Any] = [
            system,
            *question,
            {"role": "assistant", "content": None, "tool_calls": [_call(function)]},
            {"role": "tool", "tool_call_id": "1", "content": result},
            {"role": "assistant", "content": answer.format(found)},
        ]
        lines.append(json.dumps({"messages": messages, "tools": [tool]}) + "\n")
    (path,) = settings.sft.chats
    path.write_text("".join(lines), encoding="utf-8")


def numbers_in(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def _call(function: dict[str, str]) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": function}


def _part(question: str, rng: Random) -> str:
    """Returns the question, or some of its words, with equal probability."""
    words = question.rstrip("?").split()
    if rng.random() < 0.5:
        return question
    number = rng.randint(2, len(words))
    start = rng.randrange(len(words) - number + 1)
    return " ".join(words[start : start + number])


async def _find(options: dict[str, Any], query: str) -> str:
    async with contextlib.aclosing(SearchClient(options["urls"])) as client:
        return "\n".join(result.text for result in await client.search(query, options["k"]))


def main(kind: str, overrides: Sequence[str]) -> int:
    config = HERE / f"{kind}.toml"
    try:
        settings = load_settings(config, overrides)
        build = settings.model.path.parent
        build.mkdir(exist_ok=True)
        prepare_model(settings.model.path)
        with contextlib.ExitStack() as stack:
            if kind == "search":
                place = settings.run.dir / f"{settings.run.name}-retrieval"
                url = stack.enter_context(serve_passages(build, place))
                overrides = [f"--agent.options.urls={json.dumps([url])}", *overrides]
            write_chats(load_settings(config, overrides))
            tidegate("sft", str(config), "--fresh", "--then", "train", *overrides)
    except TidegateError as error:
        print(f"{kind}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] not in (["search"], ["calculator"]):
        sys.exit("usage: demo.py search|calculator [--section.key value ...]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
