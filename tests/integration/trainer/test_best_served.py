"""An engine on `checkpoints/best` serves the same policy as plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.engine.engine_http import serving
from tests.unit.trainer.learning_fixtures import make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.engine.engine import Engine
from tidegate.engine.options import EngineOptions
from tidegate.trainer.checkpoint.best import BestCheckpoint
from tidegate.trainer.policy.policy import Policy


async def test_served_logprobs_are_those_of_plain_transformers(tmp_path: Path) -> None:
    policy = Policy.load(make_model(tmp_path / "base"), TrainerSettings(learning_rate=0.02), 0)
    policy.update(make_rows(4), version=0)
    (tmp_path / "checkpoints").mkdir()
    BestCheckpoint.open(tmp_path).update_if_better(policy.save_weights(tmp_path / "weights"), 1, 1, 0.5)
    best = tmp_path / "checkpoints" / "best"
    prompt = [3, 1, 4, 1, 5]
    async with serving(Engine.load(EngineOptions(best))) as client:
        reply = await client.generate(prompt, max_new_tokens=20, temperature=1.0)
    output = reply["output_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(best)(torch.tensor([prompt + output])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]
    served = [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]]
    assert len(output) == 20
    assert served == pytest.approx(expected.tolist(), abs=1e-4)
