"""Evaluate a model on the arithmetic environment without the gateway: `evaluate.py MODEL_DIR [--tasks 200]`.

The solver's loop over batches with plain `generate`: what the model can do, told apart from everything
that Tidegate does with it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidegate.agents.calculator import calculate
from tidegate.agents.solver import TOOLS
from tidegate.envs.arithmetic import Arithmetic
from tidegate.types import Task

MAX_TURNS = 4
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


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
        out_bt = model.generate(ids_bt, attention_mask=mask_bt, max_new_tokens=64, **how)
    replies = out_bt[:, longest:].tolist()
    return [reply[: reply.index(end)] if end in reply else reply for reply in replies]


def answer_to_call(text: str) -> str | None:
    """What the solver's calculator says to a reply; None where the reply calls nothing."""
    call = TOOL_CALL.search(text)
    if call is None:
        return None
    try:
        return calculate(json.loads(call[1])["arguments"]["expression"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def episodes(model: Any, tokenizer: Any, tasks: Sequence[Task], greedy: bool = False) -> list[list[str]]:
    """The texts of each task's episode: question, call, result, …; the last is the agent's output."""
    texts = [[str(task.messages[-1]["content"])] for task in tasks]
    prompts = [
        tokenizer.apply_chat_template(
            list(task.messages), tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        for task in tasks
    ]
    live = list(range(len(tasks)))
    for _ in range(MAX_TURNS):
        replies = continuations(model, tokenizer, [prompts[one] for one in live], greedy)
        still = []
        for one, reply in zip(live, replies, strict=True):
            texts[one].append(tokenizer.decode(reply))
            result = answer_to_call(texts[one][-1])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=500, help="problems of each held-out set")
    parser.add_argument("--show", type=int, default=3, help="episodes to print of each set")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    environment = Arithmetic()
    for name, tasks in environment.eval_sets().items():
        chosen = tasks[: arguments.tasks]
        for how in ("sampled", "greedy"):
            said = episodes(model, tokenizer, chosen, greedy=how == "greedy")
            rewards = [
                environment.score(task, None, texts[-1], []).reward
                for task, texts in zip(chosen, said, strict=True)
            ]
            print(f"{name or 'held out'}: {how} accuracy {sum(rewards) / len(rewards):.3f}", flush=True)
            if how == "sampled":
                for texts, reward in list(zip(said, rewards, strict=True))[: arguments.show]:
                    print("\n".join([*texts, f"-> reward {reward:g}", ""]))


if __name__ == "__main__":
    main()
