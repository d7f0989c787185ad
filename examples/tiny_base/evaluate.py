"""Evaluates a model on the arithmetic environment without the gateway: `evaluate MODEL_DIR [--tasks 200]`.

`python -m examples.tiny_base.evaluate` runs the solver's loop over batches with plain `generate`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.bases.episodes import TOOL_CALL, episodes, load, print_episodes
from tidegate.agents.calculator import calculate
from tidegate.agents.solver import TOOLS
from tidegate.envs.arithmetic import Arithmetic

MAX_TURNS = 4
MAX_TOKENS = 64


def answer_to_call(text: str) -> str | None:
    """The calculator's result for a reply, or None if the reply does not call it."""
    call = TOOL_CALL.search(text)
    if call is None:
        return None
    try:
        return calculate(json.loads(call[1])["arguments"]["expression"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=500, help="problems per held-out set")
    parser.add_argument("--show", type=int, default=3, help="episodes to print per set")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    environment = Arithmetic()
    for name, tasks in environment.eval_sets().items():
        chosen = tasks[: arguments.tasks]
        for mode in ("sampled", "greedy"):
            texts_by_episode = episodes(
                model, tokenizer, [task.messages for task in chosen],
                tools=TOOLS, answer=answer_to_call, turns=MAX_TURNS, max_tokens=MAX_TOKENS,
                greedy=mode == "greedy",
            )  # fmt: skip
            rewards = [
                environment.score(task, None, texts[-1], []).reward
                for task, texts in zip(chosen, texts_by_episode, strict=True)
            ]
            print(f"{name or 'held out'}: {mode} accuracy {sum(rewards) / len(rewards):.3f}", flush=True)
            if mode == "sampled":
                print_episodes(texts_by_episode, rewards[: arguments.show])


if __name__ == "__main__":
    main()
