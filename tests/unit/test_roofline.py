"""The predictions of `benchmarks/roofline.py` for a tiny model, whose figures are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import roofline

TINY = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
OPERATIONS_OF_A_LAYER = 180
"""Largest number of kernels that the forward and backward pass of a layer launch."""


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"tiny": TINY, "deeper": {**TINY, "num_hidden_layers": 4}}
    monkeypatch.setattr(roofline, "PUBLISHED", known)


def test_a_step_is_recorded_with_its_work_and_memory() -> None:
    run = roofline.recorded("tiny", 1)
    work = sum(one.flops for one in run.passed)
    # Logits are computed again, and torch's kernels compute whole squares of scores.
    useful = roofline.useful_flops(run.config, run.parameters)
    assert useful < work < 1.5 * useful
    assert run.peak > 16 * run.parameters, "weights, gradients and moments in float32"
    together = roofline.fused(run.passed, run.stepped)
    assert len(together) < len(run.passed) / 2
    assert sum(one.flops for one in together) == work
    assert sum(one.size for one in together) < sum(one.size for one in run.passed)
    assert run.sent == 0


def test_each_layer_launches_few_operations() -> None:
    counts = [len(roofline.recorded(name, 1).passed) for name in ("tiny", "deeper")]
    assert 0 < counts[1] - counts[0] <= OPERATIONS_OF_A_LAYER


@pytest.mark.slow
def test_ranks_share_the_state_and_send_gradients() -> None:
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(roofline.__file__).parent)!r})
        import roofline
        roofline.PUBLISHED = {{"tiny": {TINY!r}}}
        alone, shared = roofline.recorded("tiny", 1), roofline.recorded("tiny", 4)
        assert shared.sent > 4 * shared.parameters, "gradients in float32"
        assert shared.peak < alone.peak - 10 * alone.parameters
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)  # it has a process group
