"""Compares LoRA adapters that the embedded engine applies unmerged with merged weights.

    python benchmarks/adapters_lora.py [--json] [--repeats 3] [--rank 8]

The model is random: 10 layers of SmolLM2-135M, and a vocabulary of 8,192. Each linear layer of them has an
adapter. 16 prompts of 32 tokens get replies of 32 tokens on one thread, in this process.

- *merged* and *one adapter*: the same policy, published as whole weights and as an adapter.
- *eight adapters*: two rows of each, in one batch.
- The largest difference of recorded logprobs from those of the merged model in a plain forward pass.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Check, parser_of, place, report
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tidegate.config import TrainerSettings
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.engine.scheduling.scheduler import Scheduler
from tidegate.trainer.policy.policy import Policy

SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 8192, "max_position_embeddings": 256,
         "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
ROWS, TOKENS, ADAPTERS = 16, 32, 8


def make_policy(base: Path, rank: int, seed: int) -> Policy:
    """A policy whose B is random too, so that its adapter changes the distribution."""
    policy = Policy.load(base, TrainerSettings(lora={"rank": rank, "publish": "adapter"}), seed)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.01)
    return policy


def sample(model: Model, names: list[str]) -> tuple[float, list[Generation]]:
    """Tokens per CPU second, and the replies, with the adapters of these names in turn."""
    model.cache.drop()
    limits = TokenLimits(model.vocab_size, model.max_context, model.eos_ids, False)
    scheduler = Scheduler(model, max_slots=ROWS, version="0", deliver=lambda _: None)
    asks: list[dict[str, Any]] = [
        {
            "input_ids": [(row * 97 + at * 31) % model.vocab_size for at in range(TOKENS)],
            "sampling_params": {"max_new_tokens": TOKENS, "sampling_seed": row},
            "lora_path": names[row % len(names)], "return_logprob": True,
        }
        for row in range(ROWS)
    ]  # fmt: skip
    replies = [parse_generate(ask, limits) for ask in asks]
    began = time.process_time()
    for reply in replies:
        scheduler.submit(reply)
    while not all(reply.ended for reply in replies):
        scheduler.run_once()
    assert not any(reply.error for reply in replies)
    return ROWS * TOKENS / (time.process_time() - began), replies


@torch.inference_mode()
def largest_error(merged: Any, replies: list[Generation]) -> float:
    worst = 0.0
    for reply in replies:
        ids = torch.tensor([reply.prompt_ids + reply.output_ids])
        logprobs = merged(ids).logits[0, TOKENS - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, TOKENS:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(reply.logprobs)).abs().max()))
    return worst


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    arguments = parser.parse_args()
    with place(None, "adapters") as directory:
        base, names = directory / "base", [f"policy-{number}" for number in range(ADAPTERS)]
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(base)
        for seed, name in enumerate(names):
            (policy := make_policy(base, arguments.rank, seed)).save_adapter(directory / "many" / name)
        one, merged = policy.save_adapter(directory / "one"), policy.save_weights(directory / "merged")
        sizes = [sum(f.stat().st_size for f in each.glob("*.safetensors")) for each in (one, merged)]
        kinds = {"merged": merged, "one adapter": one, "eight adapters": directory / "many"}
        options = {"max_slots": ROWS, "max_context": 256}
        models = {kind: load_model(EngineOptions(each, **options)) for kind, each in kinds.items()}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        errors: dict[str, float] = {}
        plain = AutoModelForCausalLM.from_pretrained(merged)
        for _ in range(arguments.repeats + 1):  # the first is a warm-up
            for kind, model in models.items():
                rate, replies = sample(model, names if kind == "eight adapters" else [""])
                rates[kind].append(rate)
                own = [reply for reply in replies if reply.adapter in ("", names[-1])]
                errors[kind] = largest_error(plain, own)
    figures = {kind: median(values[1:]) for kind, values in rates.items()}
    results = [{"weights": kind, "tokens_per_cpu_second": figures[kind]} for kind in kinds]
    ratio = figures["eight adapters"] / figures["one adapter"]
    checks = [
        Check("publish_bytes_vs_full", sizes[0] / sizes[1], "<=", 0.05),
        Check("tokens_per_cpu_second_vs_one", ratio, ">=", 0.7),
        Check("logprob_error", max(errors.values()), "<=", 1e-4),
    ]
    unmerged = {"unmerged_vs_merged": figures["one adapter"] / figures["merged"]}
    return report([*results, unmerged], checks, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
