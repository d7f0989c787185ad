"""Measures time and memory of the variants of an optimiser step: bfloat16, activation checkpointing, LoRA.

Time: the variants run in turns on the same rows (4 groups of 8 episodes), compared with plain float32;
medians of the process's CPU seconds. Memory: two steps on a microbatch of 4,096 tokens, each variant in its
own process; the peak memory above that of the loaded model, compared with the estimate of `--dry-run`.
Needs Linux (/proc).

    python benchmarks/forms.py [--json] [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Check, parser_of, report
from step import SETTINGS, compare, episodes, make_model, median_ratio, merged, our_step
from transformers import Qwen3Config, Qwen3ForCausalLM

from tidegate.config import Settings, TrainerSettings
from tidegate.plan.memory import memory_plan
from tidegate.plan.shape import read_shape
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.policy import Policy

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "layers computed again": {"activation_checkpointing": True},
    "LoRA, rank 16": {"lora": {"rank": 16}},
    "all three": {"compute_dtype": "bfloat16", "activation_checkpointing": True, "lora": {"rank": 16}},
}
LONG = {"rows": 4, "tokens": 1024}
MB = 1e6
EXACT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
"""Makes glibc return freed memory to the system at once, so that its caches are not counted."""


def times(rounds: int, threads: int) -> dict[str, list[float]]:
    """CPU seconds of each variant's steps."""
    rows = merged(episodes(4, 8, 1))
    policies = {
        name: Policy(make_model(), Path(), TrainerSettings(threads=threads, **SETTINGS, **form))
        for name, form in FORMS.items()
    }
    return compare({name: our_step(policy, rows, []) for name, policy in policies.items()}, rounds)


# ---------------------------------------------------------------------- memory


def make_larger_model() -> Any:
    """A random Qwen3 of 30M parameters, whose activations outweigh it on a long batch."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def long_rows() -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    length = LONG["tokens"] + 1
    mask = np.arange(length) > 0
    plain, versions = np.ones(length, np.float32), np.zeros(length, np.int64)
    return [
        TrainingSequence(
            rng.integers(0, 4096, length).astype(np.int32), mask, -8 * plain, versions, plain, plain
        )
        for _ in range(LONG["rows"])
    ]


def held(name: str) -> int:
    """Peak bytes that the steps add to this process's memory."""
    torch.set_num_threads(1)
    policy = Policy(make_larger_model(), Path(), TrainerSettings(**FORMS[name]))
    rows = long_rows()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    for _ in range(2):  # AdamW's moments exist from the second step on
        policy.update(rows, version=0)
    return resident("VmHWM") - before


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{which}:"))
    return 1024 * int(found.split()[1])


def counted(name: str, model: Path) -> int:
    """Bytes that the memory plan estimates."""
    trainer = {"microbatch_tokens": LONG["rows"] * LONG["tokens"], **FORMS[name]}
    settings = Settings.model_validate({"model": {"path": str(model)}, "trainer": trainer})
    items = memory_plan(settings, read_shape(model))
    return sum(item.size for item in items if item.owner == "trainer" and item.what != "weights")


def memory() -> list[dict[str, Any]]:
    """Measured and planned memory of each variant's step, each measured in its own process."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        make_larger_model().save_pretrained(directory)
        for name in FORMS:
            child = [sys.executable, __file__, "--held", name]
            told = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True, env=EXACT).stdout
            planned = counted(name, Path(directory))
            found.append({"form": name, "held_mb": json.loads(told) / MB, "planned_mb": planned / MB})
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per variant")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--held", choices=FORMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.held:
        print(held(arguments.held))
        return 0
    torch.set_num_threads(arguments.threads)
    seconds = times(arguments.rounds, arguments.threads)
    results = memory()
    for result in results:
        taken = seconds[result["form"]]
        result["seconds"] = statistics.median(taken)
        result["times_plain"] = median_ratio(taken, seconds["plain"])
    by_form = {result["form"]: result for result in results}
    plain, again = by_form["plain"], by_form["layers computed again"]
    checks = [
        Check("recomputed_memory", again["held_mb"] / plain["held_mb"], "<=", 0.5),
        Check("recomputed_time", again["times_plain"], "<=", 1.45),
        Check("plan_too_low_by", max(one["held_mb"] / one["planned_mb"] for one in results), "<=", 1.25),
        Check("plan_too_high_by", max(one["planned_mb"] / one["held_mb"] for one in results), "<=", 1.5),
    ]
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
