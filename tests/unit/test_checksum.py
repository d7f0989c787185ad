"""The checksum of weights: equal for tensors and files, different for any changed value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.tiny import make_tiny_model
from tidegate.trainer.checkpoint.huggingface import write_model
from tidegate.weights import checksum
from tidegate.weights.process_group import checksum as of_tensors
from tidegate.weights.process_group import sums_of_words

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool]


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(TYPES), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_tensors_and_the_file_that_they_are_written_to_have_the_same(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], kinds: list[torch.dtype], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer.{number}": (torch.randn(shape, generator=generator) * 100).to(kind)
        for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
    }
    directory = tmp_path_factory.mktemp("files")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert of_tensors(reversed(tensors.items())) == checksum.of_files(directory)
    on_device = [checksum.of_words(name, sum(sums_of_words(one).tolist())) for name, one in tensors.items()]
    assert sum(on_device) % checksum.MODULUS == checksum.of_files(directory)


def test_a_checksum_is_of_the_bytes_whatever_a_tensors_place_in_memory() -> None:
    whole = torch.randn(9, 5)
    for part in (whole[1:], whole[:, 1:], whole.T, whole[3, 3]):
        assert of_tensors([("a", part)]) == of_tensors([("a", part.contiguous().clone())])


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What a publish or a checkpoint writes, in two files."""
    model = make_tiny_model(tmp_path / "base", hidden=32)
    write_model(tmp_path / "v1", model, dict(model.state_dict()), {}, durable=False)
    tensors = load_file(tmp_path / "v1" / "model.safetensors")
    assert checksum.find_damage(tmp_path / "v1") is None
    half = dict(list(tensors.items())[::2])
    save_file(half, tmp_path / "v1" / "model.safetensors")
    save_file(
        {name: one for name, one in tensors.items() if name not in half}, tmp_path / "v1" / "b.safetensors"
    )
    assert checksum.find_damage(tmp_path / "v1") is None, "it does not matter which file a tensor is in"
    return tmp_path / "v1"


def test_one_bit_is_found_wherever_it_is(written: Path) -> None:
    for path in sorted(written.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for at in (begin, (begin + len(data)) // 2, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert "are not those that were written" in str(checksum.find_damage(written)), at
        path.write_bytes(data)
    assert checksum.find_damage(written) is None


def test_what_is_missing_exchanged_or_unreadable_is_a_fault(written: Path) -> None:
    path = written / "model.safetensors"
    tensors, data = load_file(path), path.read_bytes()
    kept = (written / checksum.FILE).read_text()
    first, second = (name for name in tensors if name.endswith("layernorm.weight"))
    tensors[first], tensors[second] = torch.full_like(tensors[first], 2.0), tensors[first]
    save_file(tensors, path)
    assert "are not those that were written" in str(checksum.find_damage(written))
    path.write_bytes(data[: len(data) // 2])
    assert "checksum" in str(checksum.find_damage(written))
    path.unlink()
    assert "are not those that were written" in str(checksum.find_damage(written))
    path.write_bytes(data)
    for nonsense in ("", "[]", json.dumps({"checksum": "7"})):
        (written / checksum.FILE).write_text(nonsense)
        assert checksum.find_damage(written) is not None, nonsense
    (written / checksum.FILE).unlink()
    assert checksum.find_damage(written) is None, "what others wrote has none"
    (written / checksum.FILE).write_text(kept)
    assert checksum.find_damage(written) is None


def test_words_are_summed_on_a_device_as_on_the_host() -> None:
    large = torch.full((9,), torch.iinfo(torch.int64).max)  # the sum wraps
    for tensor in (large, large[:-1].view(torch.uint8)[3:], torch.arange(-7, 8, dtype=torch.int8)):
        expected = of_tensors([("a", tensor)])
        assert checksum.of_words("a", sum(sums_of_words(tensor).tolist())) == expected
