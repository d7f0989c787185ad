"""A training loop of your own, in plain PyTorch, for agents on a gateway: README.md."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.own import OwnTrainer

GROUPS, RATE = 4, 2e-4


def padded(rows, name):
    arrays = [torch.from_numpy(getattr(row, name)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(arrays, batch_first=True)[:, 1:]


def loss_of(model, groups):
    rows = []
    for group in groups:
        rewards = np.array(group.rewards())
        for trajectory, advantage in zip(group.trajectories, rewards - rewards.mean(), strict=True):
            rows += rows_of(trajectory, float(advantage))
    ids, mask = padded(rows, "ids").long(), padded(rows, "mask")
    first = torch.tensor([[row.ids[0]] for row in rows])
    logits = model(
        torch.cat([first, ids], 1)[:, :-1]
    ).logits  # padding is behind the tokens: it needs no mask
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio, advantages = (logprobs - padded(rows, "logprobs")).exp(), padded(rows, "advantages")
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return -gain[mask].mean()


async def main(gateway, engine, base, directory, steps=80):
    async with OwnTrainer(gateway, [engine], Path(directory)) as trainer:
        start = trainer.checkpoint / "model" if trainer.checkpoint else base
        model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(base)
        optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
        if trainer.checkpoint:
            optimizer.load_state_dict(torch.load(trainer.checkpoint / "optimizer.pt"))

        def save(path):
            model.save_pretrained(path / "model")
            tokenizer.save_pretrained(path / "model")
            torch.save(optimizer.state_dict(), path / "optimizer.pt")

        while trainer.step < int(steps):
            groups = await trainer.batch(GROUPS)
            optimizer.zero_grad()
            loss_of(model, groups).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            await trainer.commit(groups, save)
            reward = np.mean([reward for group in groups for reward in group.rewards()])
            print(f"step {trainer.step}  reward {reward:.3f}", flush=True)


asyncio.run(main(*sys.argv[1:]))
