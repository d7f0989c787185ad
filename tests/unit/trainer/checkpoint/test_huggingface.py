"""What a base model must be to be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_model
from tidegate.errors import StartError
from tidegate.trainer.checkpoint.huggingface import read_model


@pytest.mark.parametrize("nested", [False, True])
def test_quantized_weights_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """On a GPU transformers would keep them in float8, and training them would lose their scales."""
    make_tiny_model(tmp_path, hidden=32)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    part = config.setdefault("text_config", {}) if nested else config
    part["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(StartError) as caught:
        read_model(tmp_path)
    assert str(caught.value) == (
        f"the weights of {tmp_path} are quantized (quantization_config in config.json: fp8) and cannot be "
        "trained; set model.path to the model in bfloat16"
    )
