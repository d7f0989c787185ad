"""Trains on exported tasks by TRL's GRPO; `vs_trl.py` starts it in an environment of its own with TRL.

    python benchmarks/trl_words.py PLAN.json

The file names model, tasks and settings. Each evaluation appends a line with its rewards to `evaluations`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
tokenizer = AutoTokenizer.from_pretrained(plan["model"], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)


def correct(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """The rule of examples/words/env.py."""
    replies = [completion[-1]["content"].strip().rstrip(".").lower() for completion in completions]
    return [float(reply == right) for reply, right in zip(replies, answer, strict=True)]


def evaluate(tasks: list[dict[str, Any]]) -> float:
    """Returns the mean reward of one sampled reply per task, in batches of 64."""
    rewards: list[float] = []
    for first in range(0, len(tasks), 64):
        rows = tasks[first : first + 64]
        encoded = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            made = model.generate(
                **encoded,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=plan["max_tokens"],
            )
        texts = tokenizer.batch_decode(made[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += correct([[{"content": text}] for text in texts], [row["answer"] for row in rows])
    return sum(rewards) / len(rewards)


class Evaluations(TrainerCallback):
    """Evaluates before the first step and after every few."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note(0, plan["tasks"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == plan["steps"]:
            self.note(state.global_step, plan["tasks"])
        elif state.global_step % plan["every"] == 0:
            self.note(state.global_step, plan["interim_tasks"])

    @staticmethod
    def note(step: int, tasks: int) -> None:
        model.eval()
        rewards = {name: evaluate(rows[:tasks]) for name, rows in plan["evaluation"].items()}
        model.train()
        with Path(plan["evaluations"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **rewards}) + "\n")


config = GRPOConfig(
    output_dir=plan["directory"],
    use_cpu=True,
    bf16=False,
    seed=plan["seed"],
    max_steps=plan["steps"],
    learning_rate=plan["learning_rate"],
    lr_scheduler_type="constant",
    weight_decay=plan["weight_decay"],
    max_grad_norm=plan["max_grad_norm"],
    per_device_train_batch_size=plan["groups"] * plan["group_size"],
    num_generations=plan["group_size"],
    max_completion_length=plan["max_tokens"],
    temperature=1.0,
    beta=0.0,
    epsilon=plan["clip_low"],
    epsilon_high=plan["clip_high"],
    loss_type="dapo",
    gradient_checkpointing=False,  # its default here recomputes what fits in memory
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=correct,
    args=config,
    train_dataset=Dataset.from_list(plan["training"]),
    callbacks=[Evaluations()],
)
trainer.train()
