"""What FSDP does in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer.learning_fixtures import make_model
from tidegate.config import TrainerSettings
from tidegate.trainer.checkpoint.huggingface import read_model
from tidegate.trainer.distributed.fsdp import FSDPRanks


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_layers_are_gathered_in_bfloat16_and_the_head_in_float32(tmp_path: Path) -> None:
    """The gradient of the head adds up over pieces of a microbatch."""
    model = read_model(make_model(tmp_path / "base"))
    layer, head = model.model.layers[0].self_attn.q_proj, model.get_output_embeddings()
    used: dict[str, torch.dtype] = {}

    def compute(*_: Any) -> Any:
        layer.register_forward_pre_hook(lambda *_: used.update(layer=layer.weight.dtype))
        logits = model(input_ids=torch.arange(4)[None], use_cache=False).logits
        used["head"] = head.weight.dtype
        return logits, logits, None

    computed, _ = FSDPRanks(TrainerSettings(), dist.HashStore()).shard_model(model, compute, torch.bfloat16)
    computed(None, None)
    assert used == {"layer": torch.bfloat16, "head": torch.float32}
