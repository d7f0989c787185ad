"""An agent's loop over batches with plain `generate`, to measure a model without the rest of Tidegate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def load(directory: Path) -> tuple[Any, Any]:
    """Loads model and tokenizer, with a fixed seed for sampling."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)


def continuations(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], greedy: bool, max_tokens: int
) -> list[list[int]]:
    """One sampled (T = 1) or greedy reply per prompt, without the end token."""
    longest = max(map(len, prompts))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids_bt = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask_bt = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling = (
        {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    with torch.inference_mode():
        out_bt = model.generate(ids_bt, attention_mask=mask_bt, max_new_tokens=max_tokens, **sampling)
    replies = out_bt[:, longest:].tolist()
    return [reply[: reply.index(end)] if end in reply else reply for reply in replies]


def episodes(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Sequence[Any]],
    *,
    tools: Sequence[Any],
    answer: Callable[[str], str | None],
    turns: int,
    max_tokens: int,
    greedy: bool,
) -> list[list[str]]:
    """The texts of each task's episode: question, call, result, …; the last is the agent's output.

    `tasks` are their messages; `answer` returns the tool result for a reply, or None if it calls no tool.
    """
    texts = [[str(messages[-1]["content"])] for messages in tasks]
    prompts = [
        tokenizer.apply_chat_template(
            list(messages), tools=list(tools), add_generation_prompt=True, return_dict=False
        )
        for messages in tasks
    ]
    running = list(range(len(tasks)))
    for _ in range(turns):
        replies = continuations(model, tokenizer, [prompts[index] for index in running], greedy, max_tokens)
        unfinished = []
        for index, reply in zip(running, replies, strict=True):
            texts[index].append(tokenizer.decode(reply))
            result = answer(texts[index][-1])
            if result is not None:
                texts[index].append(result)
                appended = (
                    f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
                )
                prompts[index] += reply + tokenizer.encode(appended + "<|im_start|>assistant\n")
                unfinished.append(index)
        running = unfinished
        if not running:
            break
    return texts


def print_episodes(episodes: Sequence[list[str]], rewards: Sequence[float]) -> None:
    """Prints episodes, each with its reward."""
    for texts, reward in zip(episodes, rewards, strict=False):
        print("\n".join([*texts, f"-> reward {reward:g}", ""]))
