"""A tiny mixture of experts learns from an engine whose routers choose otherwise than the trainer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.integration.engine.engine_drive import Driver
from tests.integration.gateway.test_experts import choose_otherwise
from tests.tiny import make_tiny_model
from tidegate.config import TrainerSettings
from tidegate.engine.model.model import load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.policy import Policy

VOCABULARY, STEPS, REPLIES, LENGTH = 48, 20, 32, 6


def sample(driver: Driver, step: int) -> list[Generation]:
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "return_routed_experts": True}
    replies = []
    for reply in range(REPLIES):
        params = {"max_new_tokens": LENGTH, "sampling_seed": step * REPLIES + reply}
        replies.append(parse_generate({**body, "sampling_params": params}, driver.limits))
        driver.scheduler.submit(replies[-1])
    driver.finish(replies)
    return replies


def reward(reply: Generation) -> float:
    return float(np.mean(np.array(reply.output_ids) < VOCABULARY // 4))


def row_of(reply: Generation, advantage: float, version: int) -> TrainingSequence:
    ids = np.array(reply.prompt_ids + reply.output_ids, np.int32)
    mask = np.arange(len(ids)) >= len(reply.prompt_ids)
    experts = np.concatenate([*reply.experts, np.zeros((1, 4), np.int32)]).astype(np.uint16)
    logprobs = np.array([0.0] * len(reply.prompt_ids) + reply.logprobs, np.float32)
    ones = np.ones(len(ids), np.float32)
    return TrainingSequence(
        ids, mask, logprobs, np.where(mask, version, -1), ones, advantage * mask.astype(np.float32),
        experts=experts,
    )  # fmt: skip


def test_a_tiny_mixture_of_experts_learns(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_tiny_model(base, VOCABULARY, hidden=32, family="qwen3_moe", spread=0.05)
    model = load_model(EngineOptions(base, max_slots=REPLIES, max_context=64))
    for router in model.routers.values():
        router.register_forward_hook(choose_otherwise, prepend=True)
    driver = Driver(model)
    policy = Policy.load(base, TrainerSettings(routing_replay=True, learning_rate=5e-3))
    rewards, lags = [], []
    for step in range(STEPS):
        replies = sample(driver, step)
        found = np.array([reward(reply) for reply in replies])
        rewards.append(found.mean())
        advantages = (found - found.mean()) / (found.std() + 1e-6)
        rows = [row_of(reply, float(one), step) for reply, one in zip(replies, advantages, strict=True)]
        lags.append(policy.update(rows, version=step)["logprob_max_error"])
        weights = policy.save_weights(tmp_path / f"v{step}")
        checked = model.read_weights(weights)
        driver.scheduler.load(checked, str(step + 1), keep_cache=False, abort_all=False)
    print(f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}, largest difference of logprobs {max(lags):.2g}")
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.8
    assert max(lags) <= 1e-4
