"""Runs a scheduler step by step, and computes the plain model's logprobs of its replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tidegate.engine.model.model import Model
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.engine.scheduling.scheduler import Scheduler


class Driver:
    """A scheduler without its thread: each `turn` is one prefill or decode step."""

    def __init__(
        self, model: Model, max_slots: int | None = None, version: str = "0", prefix_bytes: int = 2**26
    ) -> None:
        self.model = model
        model.cache.drop()
        self.notices: list[Generation] = []
        self.scheduler = Scheduler(
            model,
            max_slots=max_slots or model.max_slots,
            version=version,
            prefix_bytes=prefix_bytes,
            deliver=self.notices.extend,
        )
        self.limits = TokenLimits(model.vocab_size, model.max_context, model.eos_ids, False)

    def submit(
        self, prompt: Sequence[int], rid: str | None = None, lora_path: str | None = None, **params: Any
    ) -> Generation:
        body = {
            "input_ids": list(prompt), "rid": rid, "lora_path": lora_path,
            "sampling_params": params, "return_logprob": True,
        }  # fmt: skip
        generation = parse_generate(body, self.limits)
        self.scheduler.submit(generation)
        return generation

    def until(self, reached: Callable[[], bool], turns: int = 2000) -> None:
        for _ in range(turns):
            if reached():
                return
            self.scheduler.run_once()
        raise AssertionError(f"not reached within {turns} turns")

    def finish(self, generations: Sequence[Generation]) -> None:
        self.until(lambda: all(one.ended for one in generations))


def plain_logprobs(hf_model: Any, generation: Generation, temperature: float = 1.0) -> torch.Tensor:
    """Log-softmax(logits ÷ temperature) of each output token by one full forward pass, [output]."""
    ids = torch.tensor([generation.prompt_ids + generation.output_ids])
    with torch.no_grad():
        logits = hf_model(input_ids=ids).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits, -1)
    at = torch.arange(len(generation.prompt_ids) - 1, ids.shape[1] - 1)
    return logprobs[at, ids[0, 1:][at]]


def worst_error(hf_model: Any, generation: Generation, temperature: float = 1.0) -> float:
    plain = plain_logprobs(hf_model, generation, temperature)
    assert len(plain) == len(generation.logprobs) > 0
    return float((plain - torch.tensor(generation.logprobs, dtype=torch.float64)).abs().max())
