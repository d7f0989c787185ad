"""Evaluates a model on the search demo's world without the gateway: `evaluate MODEL_DIR [--tasks 170]`.

`python -m examples.search_base.evaluate` runs the search agent's loop over batches with plain `generate`; a
search ranks passages by the words they share with the query.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from functools import partial
from pathlib import Path

from examples.bases.episodes import TOOL_CALL, episodes, load, print_episodes
from examples.demo_search.synthetic_world import Fact, SyntheticWorld, WorldQuestion, make_world
from examples.search_base.make import TOOLS

MAX_TURNS = 5
MAX_TOKENS = 40
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def search_result(world: SyntheticWorld, text: str) -> str | None:
    """The search result for a reply, or None if the reply does not search."""
    call = TOOL_CALL.search(text)
    if call is None:
        return None
    try:
        words = set(json.loads(call[1])["arguments"]["query"].lower().split())
    except (ValueError, KeyError, TypeError, AttributeError):
        return 'error: the arguments must be {"query": "..."}'

    # A rare word, such as a name, has a higher weight than the word of a relation.
    def score(fact: Fact) -> int:
        fact_words = fact.text.lower().rstrip(".").split()
        return sum(
            (10 if word in fact_words[:1] or word in fact_words[-1:] else 1)
            for word in words
            if word in fact_words
        )

    return max(world.facts, key=score).text


def is_correct(question: WorldQuestion, texts: list[str]) -> bool:
    answers = ANSWER.findall(texts[-1])
    return bool(answers) and answers[-1].strip() == question.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=170, help="questions per number of hops")
    parser.add_argument("--show", type=int, default=3, help="episodes to print per number of hops")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    world = make_world(0, "held_out")
    for hops in (1, 2, 3):
        questions = list(world.questions(hops))
        random.Random(0).shuffle(questions)
        questions = questions[: arguments.tasks]
        for mode in ("sampled", "greedy"):
            texts = episodes(
                model, tokenizer, [[{"role": "user", "content": question.text}] for question in questions],
                tools=TOOLS, answer=partial(search_result, world), turns=MAX_TURNS, max_tokens=MAX_TOKENS,
                greedy=mode == "greedy",
            )  # fmt: skip
            rewards = [is_correct(*pair) for pair in zip(questions, texts, strict=True)]
            print(f"{hops} hops: {mode} accuracy {sum(rewards) / len(rewards):.3f}", flush=True)
            print_episodes(texts, rewards[: arguments.show])


if __name__ == "__main__":
    main()
