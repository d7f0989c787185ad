"""Differences of two versions are exact, and a damaged one or another base is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import make_tiny_model
from tidegate.engine.weights.loading import copy_weights, read_weights
from tidegate.trainer.checkpoint.huggingface import cast
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.weights import checksum, delta, delta_files
from tidegate.weights.delta_files import VersionTensor
from tidegate.weights.files import WeightsError


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 1000, delta.CHUNK + 3])
def test_a_difference_of_any_bits_is_exact(width: int, size: int) -> None:
    random = np.random.default_rng(width)
    old, new = (np.frombuffer(random.bytes(size * width), np.uint8) for _ in range(2))
    assert np.array_equal(delta.decode(old, delta.encode(old, new, width), width), new)


def test_a_damaged_difference_is_refused() -> None:
    old, new = np.zeros(4000, np.uint8), np.arange(4000, dtype=np.int64).astype(np.uint8)
    data = delta.encode(old, new, 2)
    for bad in (data[:-1], data + b"x", data[:50] + bytes([data[50] ^ 1]) + data[51:]):
        with pytest.raises(WeightsError, match="damaged"):
            delta.decode(old, bad, 2)


class Stage:
    """A model that changes a little with every version, and its writer."""

    def __init__(self, directory: Path, dtype: str, full_every: int = 4) -> None:
        make_tiny_model(directory / "base", hidden=32)
        self.model = make_tiny_model(directory / "model", hidden=32)
        self.notes: list[str] = []
        self.writer = VersionWriter(
            directory=directory / "weights",
            save_weights=self.save,
            buckets=self.buckets,
            dtype=dtype,
            full_every=full_every,
            note=self.notes.append,
        )
        self.number = 0

    def save(self, directory: Path, dtype: str) -> None:
        values = cast(self.model.state_dict(), dtype)
        self.model.save_pretrained(directory, state_dict=values)
        checksum.write(directory)

    def buckets(self, max_bytes: int) -> Any:
        for name, value in self.model.named_parameters():
            yield {name: value.detach()}

    def publish(self) -> Path:
        self.train()
        return self.writer.write(self.number)

    def train(self) -> None:
        self.number += 1
        torch.manual_seed(self.number)
        with torch.no_grad():
            for value in self.model.parameters():
                value.add_(torch.randn_like(value), alpha=1e-5)

    def is_live(self, engine: Any) -> bool:
        live = dict(engine.named_parameters())
        parameters = self.model.named_parameters()
        return all(torch.equal(live[name], value.to(engine.dtype)) for name, value in parameters)


@pytest.fixture(params=["float32", "bfloat16"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    return Stage(tmp_path, request.param)


def test_an_engine_follows_differences_and_a_new_one_reads_the_chain(stage: Stage, tmp_path: Path) -> None:
    dtype = getattr(torch, stage.writer.dtype)
    engine, late = (make_tiny_model(tmp_path / "base", hidden=32).to(dtype) for _ in range(2))
    places = [stage.publish()]
    copy_weights(read_weights(engine, places[0]))
    for _ in range(5):
        places.append(stage.publish())
        copy_weights(read_weights(engine, places[-1]))
        copy_weights(read_weights(late, places[-1]))
        assert stage.is_live(engine)
        assert stage.is_live(late)
        with torch.no_grad():
            late.model.norm.weight.add_(1)  # of no version any more
    assert [delta_files.is_delta(place) for place in places] == [False, True, True, True, False, True]
    size = (places[1] / delta_files.FILE).stat().st_size
    assert size < 0.8 * (places[0] / "model.safetensors").stat().st_size


def test_a_version_is_rebuilt_as_a_directory_with_all_weights(stage: Stage, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    for _ in range(3):
        place = stage.publish()
        if delta_files.is_delta(place):
            delta_files.materialise(place, whole)
    assert checksum.find_damage(whole) is None
    stage.save(tmp_path / "expected", stage.writer.dtype)
    assert checksum.of_files(whole) == checksum.of_files(tmp_path / "expected")


def test_a_model_with_tensors_of_another_type_is_written_whole(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "bfloat16")

    def save(directory: Path, dtype: str) -> None:
        values = cast(stage.model.state_dict(), dtype, {"model.norm.weight"})
        stage.model.save_pretrained(directory, state_dict=values)

    stage.writer.save_weights = save
    assert not any(delta_files.is_delta(stage.publish()) for _ in range(3))
    assert stage.notes == [
        f"no differences are published: {tmp_path}/weights/v000001: 'model.norm.weight' has no elements of "
        "2 bytes"
    ]


FAULTS = {
    "flipped": "damaged",
    "cut": "not a complete difference",
    "missing": r"no \*.safetensors file",
    "base": "has other weights than it was computed from",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_nothing(tmp_path: Path, fault: str) -> None:
    stage = Stage(tmp_path, "bfloat16")
    first, second, third = (stage.publish() for _ in range(3))
    engine = make_tiny_model(tmp_path / "base", hidden=32).to(torch.bfloat16)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    file = second / delta_files.FILE
    data = bytearray(file.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    elif fault == "cut":
        file.write_bytes(data[:-7])
    elif fault == "missing":
        file.unlink()
    else:
        stage.publish()
        stage.save(first, "bfloat16")
    with pytest.raises(WeightsError, match=FAULTS[fault]):
        copy_weights(read_weights(engine, third))
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())


def test_a_difference_from_other_weights_is_refused() -> None:
    """An engine that receives one in a call has no header of the base to compare."""
    rng = np.random.default_rng(0)
    olds, others, news = ({"w": VersionTensor(rng.integers(0, 256, 64, np.uint8), 2)} for _ in range(3))
    blobs, right = delta_files.encode(olds, news), delta_files.checksum_of(news)
    applied = delta_files.apply("a call", {"w": 2}, blobs, olds, right)
    assert np.array_equal(applied["w"].data, news["w"].data)
    with pytest.raises(WeightsError, match="another checksum"):
        delta_files.apply("a call", {"w": 2}, blobs, others, right)


def test_an_engine_of_another_type_is_told_which(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "bfloat16")
    stage.publish()
    with pytest.raises(WeightsError, match=r"engine\.dtype"):
        read_weights(make_tiny_model(tmp_path / "base", hidden=32), stage.publish())


def test_differences_end_where_they_do_not_pay(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "float32", full_every=3)
    stage.publish()
    with torch.no_grad():
        for value in stage.model.parameters():
            value.normal_()
    assert [delta_files.is_delta(stage.publish()) for _ in range(5)] == [False, False, False, True, True]


def test_repeated_refusals_end_differences(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "float32")
    stage.publish()
    stage.writer.on_refused("no")
    stage.writer.on_loaded()
    stage.writer.on_refused("no")
    assert delta_files.is_delta(stage.publish())
    stage.writer.on_refused("no")
    assert not delta_files.is_delta(stage.publish())
    assert "no further differences" in stage.notes[-1]


def test_a_publish_that_takes_longer_than_one_of_all_weights_ends_differences(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "bfloat16", full_every=3)
    kinds = []
    for seconds in (1.0, 1.01, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        kinds.append(delta_files.is_delta(stage.publish()))
        stage.writer.on_published(seconds)
    assert kinds == [False, True, True, False, False, False, False, True]


def test_the_time_of_a_difference_that_was_not_used_does_not_count(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "bfloat16", full_every=9)
    stage.publish()
    stage.writer.on_published(1.0)
    assert delta_files.is_delta(stage.publish())
    stage.writer.on_refused("no")
    stage.writer.write_full(stage.number)
    stage.writer.on_published(9.0)  # of both
    assert delta_files.is_delta(stage.publish())
    stage.writer.on_published(5.0)
    assert not delta_files.is_delta(stage.publish()), "all weights take 1 s"
