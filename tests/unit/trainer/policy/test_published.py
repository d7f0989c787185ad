"""Tensors as they are sent to engines: the names, shapes, types and values that the files have."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import make_tiny_model
from tidegate.config import TrainerSettings
from tidegate.engine.weights.loading import check_weights, copy_weights
from tidegate.trainer.checkpoint import huggingface
from tidegate.trainer.checkpoint.huggingface import read_model
from tidegate.trainer.policy import state
from tidegate.trainer.policy.policy import Policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_tensors_are_sent_as_they_are_in_files(tmp_path: Path, family: str, dtype: str) -> None:
    make_tiny_model(tmp_path / "base", hidden=32, family=family)
    policy = Policy.load(tmp_path / "base", TrainerSettings())
    policy.save_weights(tmp_path / "files", dtype=dtype)
    files = load_file(tmp_path / "files" / "model.safetensors")
    sent = [item for bucket in policy.weight_buckets(20_000, as_files=dtype) for item in bucket.items()]
    assert sorted(name for name, _ in sent) == sorted(files)
    assert {value.dtype for _, value in sent} == {getattr(torch, dtype)}
    assert all(torch.equal(value, files[name]) for name, value in sent)
    config = json.loads((tmp_path / "files" / "config.json").read_text())
    assert config["dtype"] == dtype, "else SGLang takes another one when it starts from the files"
    if family == "qwen3_moe":
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in files


@pytest.mark.parametrize("rank", [0, 2])
def test_the_correction_bias_of_a_router_is_not_rounded(tmp_path: Path, rank: int) -> None:
    """Its values differ by less than bfloat16 can tell, and their order chooses the experts."""
    base = tmp_path / "base"
    model = make_tiny_model(base, hidden=32, family="glm4_moe")
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias.uniform_(6.8, 6.82)
    model.save_pretrained(base)
    policy = Policy.load(base, TrainerSettings(lora={"rank": rank}))
    policy.save_weights(tmp_path / "files", dtype="bfloat16")
    files = load_file(tmp_path / "files" / "model.safetensors")
    name = "model.layers.1.mlp.gate."
    assert torch.equal(files[name + "e_score_correction_bias"], gate.e_score_correction_bias)
    assert torch.equal(files[name + "weight"], gate.weight), "transformers keeps it in float32, too"
    assert {value.dtype for key, value in files.items() if name not in key} == {torch.bfloat16}
    sent = {
        key: value
        for part in policy.weight_buckets(20_000, as_files="bfloat16")
        for key, value in part.items()
    }
    assert sent.keys() == files.keys()
    for key, value in sent.items():
        assert value.dtype is files[key].dtype, key
        assert torch.equal(value, files[key]), key
    config = json.loads((tmp_path / "files" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_an_engine_takes_the_buffers_that_files_have(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "base", hidden=32)
    model, live = (read_model(tmp_path / "base") for _ in range(2))
    for each in (model, live):
        each.model.register_buffer("bias", torch.rand(3))
    policy = Policy(model, tmp_path / "base", TrainerSettings())
    parts = policy.weight_buckets(20_000, as_files="bfloat16")
    copy_weights(check_weights(live, [("", *item) for part in parts for item in part.items()]))
    assert torch.equal(live.model.bias, model.model.bias)


def test_what_files_have_as_one_is_determined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "base", hidden=32)
    policy, counted = Policy.load(tmp_path / "base", TrainerSettings()), Mock(wraps=state.conversion_units)
    monkeypatch.setattr(state, "conversion_units", counted)
    sent = [list(policy.weight_buckets(20_000, as_files="bfloat16")) for _ in range(2)]
    assert len(sent[0]) == len(sent[1]) > 1
    assert counted.call_count == 1


def test_tensors_that_stay_on_the_device_pass_through_no_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "base", hidden=32, family="qwen3_moe")
    policy = Policy.load(tmp_path / "base", TrainerSettings())

    def sent(*, on_device: bool) -> dict[str, torch.Tensor]:
        parts = policy.weight_buckets(20_000, "bfloat16", on_device=on_device)
        return {name: value for bucket in parts for name, value in bucket.items()}

    expected = sent(on_device=False)

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("copied to the host")

    monkeypatch.setattr(torch.Tensor, "cpu", refuse)
    found = sent(on_device=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("raises", [False, True])
def test_tensors_that_files_have_as_one_are_gathered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]

    def joined(_: object, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = [values[name] for name in names if name in values]
        if raises and len(parts) == 1:
            raise ValueError("a part is missing")
        rest = {name: value for name, value in values.items() if name not in names}
        return rest | ({"both": torch.cat(parts)} if parts else {})

    make_tiny_model(tmp_path / "base", hidden=32)
    policy = Policy.load(tmp_path / "base", TrainerSettings())
    monkeypatch.setattr(huggingface, "revert_weight_conversion", joined)
    sent = [item for bucket in policy.weight_buckets(1, as_files="float32") for item in bucket.items()]
    weights = policy.weights()
    assert len(dict(sent)) == len(sent) == len(weights) - 1
    assert torch.equal(dict(sent)["both"], torch.cat([weights[name] for name in names]))
