"""Measures the cost of an optimiser step: tokens per second and FLOPs utilisation.

The step is compared on the same model and rows with a plain loop on Hugging Face and torch, with rows sorted
by length into microbatches of the same size; and, on episodes of eight turns, with that loop on one padded
row per turn, as in a trainer that does not merge a conversation's turns. The steps alternate. Figures are
medians of the process's CPU seconds, so that other load on the machine does not count. Tokens are those of
the merged rows, each counted once, for all loops.

    python benchmarks/step.py [--json] [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Check, parser_of, report
from transformers import Qwen3Config, Qwen3ForCausalLM

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.microbatch import PrefixBatch
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.rows import TrainingSequence, rows_of
from tidegate.trainer.policy.policy import Policy
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Outcome, Trajectory

VOCABULARY = 4096
SETTINGS = {"microbatch_tokens": 4096, "learning_rate": 1e-5}
Step = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """Work of one sequence in the model: `new` positions computed after `known` cached ones, and logits for
    `trained` of them."""

    known: int
    new: int
    trained: int


def make_model() -> Any:
    """A random Qwen3 of 5M parameters: large enough that arithmetic counts, small enough for minutes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


# ---------------------------------------------------------------------- the rows


def episode(rng: np.random.Generator, session: str, prompt: np.ndarray, turns: int) -> Trajectory:
    """A conversation: the prompt, then replies of 20 to 60 tokens and tool results of 10 to 30."""
    made = []
    for index in range(turns):
        asked = prompt if not index else rng.integers(0, VOCABULARY, int(rng.integers(10, 31)))
        length = int(rng.integers(20, 61))
        made.append(
            Turn(
                index=index,
                parent=index - 1 if index else None,
                delta_ids=asked.astype(np.int32),
                output_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
                version_spans=(VersionSpan(0, 0, length),),
                finish_reason="stop",
                temperature=1.0,
            )
        )
    return Trajectory(session, "t", "e", "train", Outcome.COMPLETED, made, group_id=session.split("/")[0])


def episodes(groups: int, size: int, turns: int) -> list[Trajectory]:
    """Groups of episodes that share a prompt of 60 to 200 tokens."""
    rng = np.random.default_rng(0)
    found = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(60, 201)))
        found += [episode(rng, f"{group}/{slot}", prompt, turns) for slot in range(size)]
    return found


def merged(trajectories: Iterable[Trajectory]) -> list[TrainingSequence]:
    return [row for number, one in enumerate(trajectories) for row in rows_of(one, (-1.0) ** number)]


def row_per_turn(trajectories: Iterable[Trajectory]) -> list[TrainingSequence]:
    """One row per turn, each with its whole prompt."""
    found = []
    for number, one in enumerate(trajectories):
        for turn in one.turns:
            alone = replace(turn, index=0, parent=None, delta_ids=one.prompt_ids(turn))
            found += rows_of(replace(one, turns=[alone]), (-1.0) ** number)
    return found


# ---------------------------------------------------------------------- the two loops


def plain_step(model: Any, rows: list[TrainingSequence]) -> Step:
    """The plain loop: forward, loss and backward on length-sorted microbatches, then AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS["learning_rate"], fused=True)
    batches = [padded([rows[index] for index in part]) for part in sorted_parts(rows)]
    trained = sum(row.trained for row in rows)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for ids_bt, seen_bt, mask_bt, mu_bt, advantage_bt in batches:
            logits_btv = model(input_ids=ids_bt, attention_mask=seen_bt, use_cache=False).logits[:, :-1]
            logprobs_bt = torch.log_softmax(logits_btv, dim=-1).gather(-1, ids_bt[:, 1:, None])[..., 0]
            weight_bt = (logprobs_bt.detach() - mu_bt).exp().clamp(max=2.0) * advantage_bt * mask_bt
            (-(weight_bt * logprobs_bt).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def sorted_parts(rows: list[TrainingSequence]) -> list[list[int]]:
    """Packs rows by descending length into microbatches with Tidegate's limit of padded tokens."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    parts: list[list[int]] = []
    for index in order:
        part = parts[-1] if parts else []
        if part and (len(part) + 1) * len(rows[part[0]].ids) <= SETTINGS["microbatch_tokens"]:
            part.append(index)
        else:
            parts.append([index])
    return parts


def padded(rows: list[TrainingSequence]) -> tuple[torch.Tensor, ...]:
    """Returns (ids, attention mask, and from position 1 on: trained, log μ, advantage), [rows, longest]."""
    longest = max(len(row.ids) for row in rows)

    def laid(values: Iterable[np.ndarray], kind: torch.dtype) -> torch.Tensor:
        filled = [np.pad(one, (0, longest - len(one))) for one in values]
        return torch.from_numpy(np.stack(filled)).to(kind)

    return (
        laid((row.ids for row in rows), torch.int64),
        laid((np.ones(len(row.ids)) for row in rows), torch.int64),
        laid((row.mask for row in rows), torch.float32)[:, 1:],
        laid((row.logprobs for row in rows), torch.float32)[:, 1:],
        laid((row.advantages for row in rows), torch.float32)[:, 1:],
    )


def our_step(policy: Policy, rows: list[TrainingSequence], padding: list[float]) -> Step:
    def step() -> None:
        padding.append(policy.update(rows, version=0)["padding_ratio"])

    return step


# ---------------------------------------------------------------------- arithmetic


def whole(rows: Iterable[TrainingSequence]) -> list[Work]:
    return [Work(0, row.inputs, row.trained) for row in rows]


def computed(rows: list[TrainingSequence], batches: Iterable[PrefixBatch]) -> list[Work]:
    """Work of these batches of rows, which compute their shared prefixes once."""
    found = []
    for bundle in batches:
        found += [Work(0, int(length), 0) for one in bundle.prefixes for length in one.lengths_p]
        for batch in bundle.microbatches:
            for at, index in enumerate(batch.rows):
                found.append(Work(int(batch.starts_b[at]), int(batch.lengths_b[at]), rows[index].trained))
    return found


def flops(model: Any, work: Iterable[Work]) -> float:
    """FLOPs of a forward and backward pass without padding, with logits only for trained tokens: 6 per weight
    and position, 12 per pair of positions and attended dimension (Kaplan et al., 2020)."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(one.numel() for one in model.parameters()) - head
    attended = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return sum(
        6 * body * one.new + 6 * head * one.trained + 12 * attended * one.new * (one.known + one.new / 2)
        for one in work
    )


def matmul_peak() -> float:
    """Peak FLOPs per second of a float32 matmul of 1024 × 1024."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = min(timed(lambda: left @ right) for _ in range(30))
    return 2 * 1024**3 / best


def timed(step: Callable[[], object]) -> float:
    """CPU seconds of this process over all threads."""
    began = time.process_time()
    step()
    return time.process_time() - began


def compare(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each step; the steps alternate, after a warm-up round."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step))
    return seconds


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def measure(
    name: str, trajectories: list[Trajectory], arguments: argparse.Namespace, *, by_turn: bool
) -> tuple[list[dict[str, Any]], dict[str, list[float]], float]:
    """Returns the results, the seconds of every step, and Tidegate's share of padding."""
    rows, padding = merged(trajectories), list[float]()
    policy = Policy(make_model(), Path(), TrainerSettings(threads=arguments.threads, **SETTINGS))
    steps = {
        "tidegate": our_step(policy, rows, padding),
        "plain": plain_step(make_model(), rows),
    }
    batches = prefix_batches(rows, int(SETTINGS["microbatch_tokens"]))
    work = {"tidegate": computed(rows, batches), "plain": whole(rows)}
    if by_turn:
        turns = row_per_turn(trajectories)
        steps["row_per_turn"], work["row_per_turn"] = plain_step(make_model(), turns), whole(turns)
    peak = matmul_peak()
    seconds = compare(steps, arguments.rounds)
    tokens = sum(row.inputs for row in rows)
    results = [
        {
            "rows": name,
            "step": which,
            "seconds": statistics.median(taken),
            "tokens_per_s": tokens / statistics.median(taken),
            "flops_utilisation": flops(policy.model, work[which]) / statistics.median(taken) / peak,
            "tokens_computed": sum(one.new for one in work[which]),
        }
        for which, taken in seconds.items()
    ]
    return results, seconds, max(padding)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per loop")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    one, seconds, padding = measure("one turn", episodes(4, 8, 1), arguments, by_turn=False)
    eight, by_turn, padding_of_eight = measure("eight turns", episodes(1, 8, 8), arguments, by_turn=True)
    checks = [
        Check("vs_plain", median_ratio(seconds["plain"], seconds["tidegate"]), ">=", 0.95),
        Check("vs_plain_eight_turns", median_ratio(by_turn["plain"], by_turn["tidegate"]), ">=", 0.95),
        Check("vs_row_per_turn", median_ratio(by_turn["row_per_turn"], by_turn["tidegate"]), ">=", 3.0),
        Check("padding", max(padding, padding_of_eight), "<=", 0.05),
    ]
    return report([*one, *eight], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
