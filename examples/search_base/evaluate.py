"""Evaluate a model on the search demo's world by itself: `evaluate.py MODEL_DIR [--tasks 170]`.

The search agent's loop over batches with plain `generate`, searching by words held in common: what the
model can do, told apart from everything that Tidegate does with it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make import TOOLS
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidegate.envs.search_world import Fact, Question, World, make_world

MAX_TURNS = 5
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def continuations(model: Any, tokenizer: Any, prompts: Sequence[list[int]], greedy: bool) -> list[list[int]]:
    """One sampled (T = 1) or greedy reply to each prompt, without the end token."""
    longest = max(map(len, prompts))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids_bt = torch.tensor([[pad] * (longest - len(one)) + one for one in prompts])
    mask_bt = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    how = (
        {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    with torch.inference_mode():
        out_bt = model.generate(ids_bt, attention_mask=mask_bt, max_new_tokens=40, **how)
    replies = out_bt[:, longest:].tolist()
    return [reply[: reply.index(end)] if end in reply else reply for reply in replies]


def found(world: World, text: str) -> str | None:
    """What a search says to a reply; None where the reply searches nothing."""
    call = TOOL_CALL.search(text)
    if call is None:
        return None
    try:
        words = set(json.loads(call[1])["arguments"]["query"].lower().split())
    except (ValueError, KeyError, TypeError, AttributeError):
        return 'error: the arguments must be {"query": "..."}'

    # The rarer word, a name, counts for more than a relation's.
    def score(fact: Fact) -> int:
        said = fact.text.lower().rstrip(".").split()
        return sum((10 if word in said[:1] or word in said[-1:] else 1) for word in words if word in said)

    return max(world.facts, key=score).text


def episodes(
    model: Any, tokenizer: Any, world: World, questions: Sequence[Question], greedy: bool
) -> list[list[str]]:
    """The texts of each question's episode: question, call, result, …; the last is the agent's output."""
    texts = [[question.text] for question in questions]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}],
            tools=TOOLS,
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions
    ]
    live = list(range(len(questions)))
    for _ in range(MAX_TURNS):
        replies = continuations(model, tokenizer, [prompts[one] for one in live], greedy)
        still = []
        for one, reply in zip(live, replies, strict=True):
            texts[one].append(tokenizer.decode(reply))
            result = found(world, texts[one][-1])
            if result is not None:
                texts[one].append(result)
                more = (
                    f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
                )
                prompts[one] += reply + tokenizer.encode(more + "<|im_start|>assistant\n")
                still.append(one)
        live = still
        if not live:
            break
    return texts


def right(question: Question, texts: list[str]) -> bool:
    said = ANSWER.findall(texts[-1])
    return bool(said) and said[-1].strip() == question.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=170, help="questions of each number of hops")
    parser.add_argument("--show", type=int, default=3, help="episodes to print of each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    world = make_world(0, "held_out")
    for hops in (1, 2, 3):
        questions = list(world.questions(hops))
        random.Random(0).shuffle(questions)
        questions = questions[: arguments.tasks]
        for how in ("sampled", "greedy"):
            said = episodes(model, tokenizer, world, questions, how == "greedy")
            scores = [right(*one) for one in zip(questions, said, strict=True)]
            print(f"{hops} hops: {how} accuracy {sum(scores) / len(scores):.3f}", flush=True)
            for texts, score in list(zip(said, scores, strict=True))[: arguments.show]:
                print("\n".join([*texts, f"-> {score}", ""]))


if __name__ == "__main__":
    main()
