"""New weights are checked completely before the served model is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_tiny_model
from tidegate.engine.weights.loading import copy_weights, read_weights
from tidegate.weights import checksum
from tidegate.weights.files import WeightsError

Tensors = dict[str, torch.Tensor]
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_model(tmp_path_factory.mktemp("live"), family=request.param, hidden=32)


@pytest.fixture
def published(live: Any, tmp_path: Path) -> Path:
    make_tiny_model(tmp_path, family=live.config.model_type, hidden=32, seed=7)
    return tmp_path


def snapshot(model: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"the tensor {NORM!r} is missing"),
        (lambda t: t.pop(EMBED), "is missing"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "has no tensor 'model.extra'"),
        (lambda t: t.update({NORM: torch.zeros(5)}), f"{NORM!r} has shape [5], expected [32]"),
        (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int32)}), f"{NORM!r} has type torch.int32"),
        (lambda t: t.update({EMBED: t[EMBED].T.contiguous()}), f"{EMBED!r} has shape [32, 97]"),
    ],
)
def test_each_fault_is_named_and_nothing_is_touched(
    live: Any, published: Path, change: Callable[[Tensors], object], words: str
) -> None:
    before = snapshot(live)
    rewrite(published, change)
    with pytest.raises(WeightsError) as refusal:
        read_weights(live, published)
    assert words in str(refusal.value)
    assert str(published) in str(refusal.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in live.state_dict().items())


@pytest.mark.parametrize("kept", [0, 7, 500, -1])
def test_a_file_cut_short_is_refused(live: Any, published: Path, kept: int) -> None:
    path = published / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        read_weights(live, published)


def test_a_missing_directory_an_empty_one_and_a_missing_shard(live: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no such directory"):
        read_weights(live, tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors file"):
        read_weights(live, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(WeightsError, match="not a safetensors index"):
        read_weights(live, tmp_path)
    index.write_text(json.dumps({"weight_map": {NORM: "part-1.safetensors"}}))
    with pytest.raises(WeightsError, match=r"part-1\.safetensors.*missing"):
        read_weights(live, tmp_path)


def test_good_weights_become_the_models_in_place_and_tied_ones_stay_tied(live: Any, published: Path) -> None:
    addresses = {name: tensor.data_ptr() for name, tensor in live.state_dict().items()}
    copy_weights(read_weights(live, published))
    fresh = type(live).from_pretrained(published)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(live(input_ids=ids).logits, fresh(input_ids=ids).logits)
    assert {name: tensor.data_ptr() for name, tensor in live.state_dict().items()} == addresses


def test_weights_in_several_files_and_in_another_float_type(live: Any, published: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    (published / "model.safetensors").unlink()
    names = sorted(tensors)
    for part in range(2):
        half = {name: tensors[name].to(torch.bfloat16) for name in names[part::2]}
        save_file(half, published / f"model-{part}.safetensors")
    copy_weights(read_weights(live, published))
    assert torch.equal(live.state_dict()[NORM], tensors[NORM].to(torch.bfloat16).float())
    save_file({NORM: tensors[NORM]}, published / "again.safetensors")
    with pytest.raises(WeightsError, match="also in another file"):
        read_weights(live, published)


def test_tied_tensors_that_differ_are_refused(published: Path, live: Any) -> None:
    if not live.config.tie_word_embeddings:
        pytest.skip("nothing is tied in this family")
    rewrite(published, lambda t: t.update({"lm_head.weight": t[EMBED] + 1}))
    with pytest.raises(WeightsError, match="tied"):
        read_weights(live, published)
    rewrite(published, lambda t: t.update({"lm_head.weight": t[EMBED].clone()}))
    copy_weights(read_weights(live, published))


def test_weights_that_are_not_those_that_were_written_are_refused(live: Any, published: Path) -> None:
    checksum.write(published)
    read_weights(live, published)
    rewrite(published, lambda tensors: tensors[NORM].view(-1)[3].add_(1e-3))
    before = snapshot(live)
    with pytest.raises(WeightsError, match="are not those that were written"):
        read_weights(live, published)
    assert all(torch.equal(before[name], tensor) for name, tensor in live.state_dict().items())
