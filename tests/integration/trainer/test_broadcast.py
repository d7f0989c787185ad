"""Weights sent over a process group to the real engine: complete or not at all, with files as fallback."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.integration.engine.engine_http import Client, serving
from tests.tiny import make_tiny_model
from tidegate.engine.engine import Engine
from tidegate.engine.options import EngineOptions
from tidegate.engine.weights.receiver import WeightsReceiver
from tidegate.trainer.checkpoint.huggingface import write_shards
from tidegate.trainer.publish import broadcast as sender
from tidegate.trainer.publish import version_writer
from tidegate.trainer.publish.broadcast import Bucket, WeightBroadcaster
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.weights.checksum import find_damage
from tidegate.weights.files import weight_files
from tidegate.weights.process_group import GLOO_INTERFACE, WeightsGroup, buckets, checksum


@dataclass
class Stage:
    """An engine, a model to be sent to it, and what does it."""

    client: Client
    engine: Engine
    model: Any
    control: EngineControl
    notes: list[str]
    directory: Path

    def __post_init__(self) -> None:
        self.sender = WeightBroadcaster(
            lambda most: self.buckets(most), self.notes.append, bucket_bytes=20_000
        )

    def live(self) -> dict[str, torch.Tensor]:
        return dict(self.engine.model.hf_model.named_parameters())

    def is_live(self) -> bool:
        sent = dict(self.model.named_parameters())
        return all(torch.equal(value, sent[name]) for name, value in self.live().items())

    def buckets(self, most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        parameters = dict(self.model.named_parameters())
        for names in buckets(parameters, most_bytes):
            yield {name: parameters[name].detach() for name in names}

    async def send(self, version: int) -> bool:
        """Whether they are live on the engine."""
        return await self.sender.send([self.control], version) == {self.control.url}


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    make_tiny_model(tmp_path / "base", hidden=32)
    model = make_tiny_model(tmp_path / "other", hidden=32, seed=7)
    engine = Engine.load(EngineOptions(tmp_path / "base", weight_version=3))
    notes: list[str] = []
    async with serving(engine) as client, aiohttp.ClientSession() as http:
        control = EngineControl(client.url, http)
        made = Stage(client, engine, model, control, notes, tmp_path / "other")
        yield made
        made.sender.close()


def publisher(stage: Stage, tmp_path: Path) -> Publisher:
    """Publishes `stage.model`; engines that read files get what lies in `stage.directory`."""

    async def nothing(*_: object) -> None:
        return

    def save(directory: Path, dtype: str) -> None:
        stage.model.save_pretrained(directory)

    return Publisher(
        writer=VersionWriter(directory=tmp_path, save_weights=save, buckets=stage.buckets),
        engines=lambda: [stage.client.url], cancel_stale=nothing, quarantine=nothing, restore=nothing,
        current=(stage.directory, 3), retry_s=20.0, sender=stage.sender,
    )  # fmt: skip


def test_a_checksum_is_of_names_and_bits() -> None:
    one, other = torch.arange(8.0), torch.arange(8.0).flip(0) * 3
    said = checksum([("a", one), ("b", other)])
    assert said == checksum([("b", other), ("a", one.clone())])
    assert said != checksum([("b", one), ("a", other)])
    assert said != checksum([("a", one)])
    assert checksum([("a", one.bfloat16())]) != checksum([("a", one.half())])
    other[3] = torch.nextafter(other[3], torch.tensor(0.0))
    assert said != checksum([("a", one), ("b", other)])


def test_buckets_are_bounded_and_lose_nothing() -> None:
    sizes = {"a": 10, "b": 5, "c": 30, "d": 1, "e": 4}
    found = buckets({name: torch.zeros(size) for name, size in sizes.items()}, 60)
    assert found == [["a", "b"], ["c"], ["d", "e"]]
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    assert buckets(tensors, 60, lambda name: {"d": "a"}.get(name, name)) == [["a", "d"], ["b"], ["c"], ["e"]]


async def test_what_is_sent_is_live_at_once_and_running_requests_go_on(stage: Stage) -> None:
    before = {name: value.clone() for name, value in stage.live().items()}
    prompt = list(range(1, 9))
    running = asyncio.create_task(stage.client.generate(prompt, max_new_tokens=1000, ignore_eos=True))
    await stage.client.until(lambda info: info["tokens_sampled"] > 5)
    await stage.control.call("/pause_generation", {"mode": "retract"})  # it may not end before they are sent
    assert await stage.send(4)
    assert stage.is_live()
    assert not all(torch.equal(before[name], value) for name, value in stage.live().items())
    assert len(list(stage.buckets(20_000))) > 2
    reply = await running
    versions = [span["version"] for span in reply["meta_info"]["weight_versions"]]
    assert versions == ["3", "4"], "it straddles the publish"
    with torch.no_grad():
        for value in stage.model.parameters():
            value.add_(0.01)
    assert await stage.send(5)  # over the group that is there
    assert stage.is_live()
    assert len(stage.sender._links) == 1


async def test_an_engine_that_was_started_again_reads_the_files_and_then_joins(
    stage: Stage, tmp_path: Path
) -> None:
    publish = publisher(stage, tmp_path)
    await publish.publish(4)
    assert (await stage.client.info())["weight_version"] == "4"
    assert not stage.notes
    stage.engine.receiver.leave(*stage.engine.receiver._groups)  # as in an engine that has just started
    with torch.no_grad():
        stage.model.lm_head.weight.mul_(1.1)
    await publish.publish(5)
    assert stage.is_live()
    assert (await stage.client.info())["weight_version"] == "5"
    assert len(stage.notes) == 1
    assert "weights could not be sent and are loaded from files instead" in stage.notes[0]
    await publish.publish(6)
    assert (await stage.client.info())["weight_version"] == "6"
    assert len(stage.notes) == 1, "it joined a group of its own"


async def test_engines_serve_a_sent_version_before_its_files_are_written(
    stage: Stage, tmp_path: Path
) -> None:
    publish = publisher(stage, tmp_path)
    save, writing, may_end = publish.writer.save_weights, threading.Event(), threading.Event()

    def save_slowly(directory: Path, dtype: str) -> None:
        writing.set()
        assert may_end.wait(30)
        save(directory, dtype)

    publish.writer.save_weights = save_slowly
    async with asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(publish.publish(4))
        assert await asyncio.to_thread(writing.wait, 30)
        info = await stage.client.info()
        assert (info["weight_version"], info["paused"]) == ("4", None)
        assert stage.is_live()
        resync = tasks.create_task(publish.resync(stage.client.url))  # as the next poll would start it
        assert publish.current == (stage.directory, 3), "whose files there are"
        may_end.set()
        await publishing
        assert await resync, "it waited for the files"
    assert publish.current == publish.startable == (tmp_path / "v000004", 4)


async def test_files_of_a_version_that_every_engine_serves_are_written_while_the_policy_changes(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, writing, may_end = publisher(stage, tmp_path), threading.Event(), threading.Event()
    await publish.publish(4)  # whose config and tokenizer the next one has

    def write_slowly(*arguments: Any) -> None:
        writing.set()
        assert may_end.wait(30)
        write_shards(*arguments)

    monkeypatch.setattr(version_writer, "write_shards", write_slowly)
    change(stage.model)
    sent = {name: value.clone() for name, value in stage.model.named_parameters()}
    await publish.publish(5)
    assert await asyncio.to_thread(writing.wait, 30)
    change(stage.model)
    assert publish.current == (tmp_path / "v000005", 5)
    assert publish.startable == (tmp_path / "v000004", 4), "with which an engine starts meanwhile"
    await stage.control.load(tmp_path / "v000004", 4)
    resync = asyncio.create_task(publish.resync(stage.client.url))
    next_one = asyncio.create_task(publish.publish(6))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not resync.done()
    assert (await stage.client.info())["weight_version"] == "4"
    may_end.set()
    assert await resync, "it waited for the files"
    await next_one
    files = tmp_path / "v000005"
    read = AutoModelForCausalLM.from_pretrained(files, dtype=torch.float32)
    assert all(torch.equal(value, sent[name]) for name, value in read.named_parameters())
    assert find_damage(files) is None
    assert (await publish.files(), publish.startable) == (publish.current, (tmp_path / "v000006", 6))


def test_copies_from_a_gpu_use_the_memory_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are in host memory here, which stands for the GPU's; three buckets have one size."""
    made: list[torch.Tensor] = []

    def pinned(like: torch.Tensor, **_: object) -> torch.Tensor:
        made.append(torch.zeros(like.shape, dtype=like.dtype))
        return made[-1]

    monkeypatch.setattr(version_writer, "HOST", torch.device("meta"))
    monkeypatch.setattr(torch, "empty_like", pinned)

    def values(version: int) -> dict[str, torch.Tensor]:
        return {name: torch.full((3,), 10.0 * version + number) for number, name in enumerate("abc")}

    def save(directory: Path, dtype: str) -> None:
        directory.mkdir()
        save_file(values(1), directory / "model.safetensors")

    writer = VersionWriter(directory=tmp_path, save_weights=save)
    for version in (1, 2, 3):
        writer.begin_sending()
        for name, value in values(version).items():
            fields = {"names": [name], "dtypes": ["float32"], "shapes": [[3]]}
            writer.keep(Bucket(fields, value.view(torch.uint8), checksum([(name, value)])))
        place = writer.write_sent(version) if writer.can_write_sent() else writer.write_full(version)
        read = {name: value for path in weight_files(place) for name, value in load_file(path).items()}
        assert {name: value.tolist() for name, value in read.items()} == {
            name: value.tolist() for name, value in values(version).items()
        }
    assert len(made) == 3


async def test_files_that_could_not_be_written_end_the_next_publish(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = publisher(stage, tmp_path)
    await publish.publish(4)

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(version_writer, "write_shards", full_disk)
    await publish.publish(5)
    with pytest.raises(OSError, match="No space left"):
        await publish.publish(6)
    assert publish.startable == (tmp_path / "v000004", 4)
    assert not (tmp_path / "v000005").exists()


async def test_files_that_cannot_be_written_after_sending_leave_the_version_before_current(
    stage: Stage, tmp_path: Path
) -> None:
    publish = publisher(stage, tmp_path)
    save = publish.writer.save_weights

    def full_disk(directory: Path, dtype: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    publish.writer.save_weights = full_disk
    with pytest.raises(OSError, match="No space left"):
        await publish.publish(4)
    assert publish.current == (stage.directory, 3)
    publish.writer.save_weights = save
    await publish.publish(5)
    assert publish.current == (tmp_path / "v000005", 5)
    assert (await stage.client.info())["weight_version"] == "5"


@pytest.mark.parametrize("how", ["full disk", "cancelled"])
async def test_an_engine_whose_transfer_failed_goes_on_though_the_files_cannot_be_written(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    publish, writing, may_end = publisher(stage, tmp_path), threading.Event(), threading.Event()
    monkeypatch.setattr(sender, "checksum", lambda tensors: checksum(tensors) + 1)

    def save(directory: Path, dtype: str) -> None:
        writing.set()
        assert may_end.wait(30)
        if how == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        stage.model.save_pretrained(directory)

    publish.writer.save_weights = save
    publishing = asyncio.create_task(publish.publish(4))
    assert await asyncio.to_thread(writing.wait, 30)
    assert (await stage.client.info())["paused"] == "retract"
    if how == "cancelled":
        publishing.cancel()
        await asyncio.sleep(0)
        assert not publishing.done(), "the policy is still read"
    may_end.set()
    with pytest.raises((OSError, asyncio.CancelledError)):
        await publishing
    info = await stage.client.info()
    assert (info["weight_version"], info["paused"]) == ("3", None)


@pytest.mark.parametrize("fault", ["missing", "shape", "corrupt"])
async def test_weights_that_arrive_incomplete_are_not_made_live(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    before = {name: value.clone() for name, value in stage.live().items()}
    whole = stage.buckets

    def spoiled(most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        for bucket in whole(most_bytes):
            if fault == "missing":
                bucket.pop("model.norm.weight", None)
            elif fault == "shape" and "model.norm.weight" in bucket:
                bucket["model.norm.weight"] = torch.zeros(5)
            yield bucket

    with monkeypatch.context() as patch:
        patch.setattr(stage, "buckets", spoiled)
        if fault == "corrupt":
            patch.setattr(sender, "checksum", lambda tensors: checksum(tensors) + 1)
        assert not await stage.send(4)
    words = {
        "missing": "is missing",
        "shape": "has shape",
        "corrupt": "the checksum of the received weights is wrong",
    }
    assert words[fault] in stage.notes[0]
    info = await stage.client.info()
    assert info["paused"] == "retract", "it waits for files"
    if fault == "corrupt":
        assert info["weight_version"] == "partial", "what is live is of no version"
    else:
        assert info["weight_version"] == "3"
        assert all(torch.equal(before[name], value) for name, value in stage.live().items())
    assert await stage.send(5)
    assert stage.is_live()
    info = await stage.client.info()
    assert (info["paused"], info["weight_version"]) == (None, "5")


class OfTwoRanks:
    """An engine whose weights two ranks hold, each of which joins and receives, as SGLang's do."""

    url = "http://127.0.0.1:1"
    keeps_kv = False

    def __init__(self) -> None:
        self.ranks = (WeightsReceiver(), WeightsReceiver())

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        if path == "/server_info":
            return {"tp_size": 2, "dp_size": 1, "pp_size": 1, "device": "cpu", "stages_weights": True}
        if path == "/update_weight_version":
            return {}
        if path == "/end_weight_update":
            self.came = [rank.end() for rank in self.ranks]
            return {"checksum": self.came[0].checksum}
        await asyncio.gather(
            *(asyncio.to_thread(self._on, number, path, body or {}) for number in range(len(self.ranks)))
        )
        return {}

    def _on(self, number: int, path: str, body: dict[str, Any]) -> None:
        rank = self.ranks[number]
        if path == "/init_weights_update_group":
            rank.join(
                body["master_address"], body["master_port"], body["rank_offset"] + number, body["world_size"],
                body["group_name"], body["backend"],
            )  # fmt: skip
        elif path == "/begin_weight_update":
            rank.begin()
        elif path == "/update_weights_from_distributed":
            tensors = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
            rank.receive(body["group_name"], tensors, load_format=body["load_format"])

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def verify(self, version: int) -> None: ...


async def test_every_rank_of_an_engine_gets_the_weights() -> None:
    """Tensors of both types are in one bucket: five numbers of two bytes, then one with strides
    (verl-project/verl#6919)."""
    engine, weights = (
        OfTwoRanks(),
        {"a": torch.ones(5, dtype=torch.bfloat16), "b": torch.arange(12.0).view(2, 6)[:, ::2]},
    )
    notes: list[str] = []
    made = WeightBroadcaster(lambda _: (one for one in [weights]), notes.append)
    assert await made.send([engine], 3) == {engine.url}, notes
    for came in (update.tensors for update in engine.came):
        assert came.keys() == weights.keys()
        assert all(torch.equal(came[name], weights[name]) for name in weights)
    made.close()


async def test_another_trainer_may_send_tensors_one_by_one() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    engine = WeightsReceiver()
    own, _ = await asyncio.gather(
        asyncio.to_thread(WeightsGroup, store, 0, 2, "single", 20.0, "127.0.0.1"),
        asyncio.to_thread(engine.join, "127.0.0.1", store.port, 1, 2, "single", "gloo"),
    )
    engine.begin()
    sent = [torch.arange(3.0), torch.ones(2, 2)]
    receive = partial(engine.receive, "single", [("a", "float32", [3]), ("b", "float32", [2, 2])])
    _, came = await asyncio.gather(asyncio.to_thread(own.broadcast, sent), asyncio.to_thread(receive))
    assert all(torch.equal(one, it) for one, it in zip(came.tensors.values(), sent, strict=True))
    engine.leave("single")
    own.close()


async def test_gloo_listens_where_the_other_end_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the machine's name points, which is loopback's first address on many."""
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    here = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    there = dist.TCPStore("127.0.0.1", here.port, 2)
    places = ((here, 0, "127.0.0.2"), (there, 1, "127.0.0.3"))
    groups = await asyncio.gather(
        *(asyncio.to_thread(WeightsGroup, store, rank, 2, "apart", 20.0, own) for store, rank, own in places)
    )
    sent, came = torch.arange(3.0), torch.zeros(3)
    await asyncio.gather(
        *(asyncio.to_thread(one.broadcast, [it]) for one, it in zip(groups, (sent, came), strict=True))
    )
    assert torch.equal(sent, came)
    table = await asyncio.to_thread(Path("/proc/net/tcp").read_text)
    sockets = [line.split()[1] for line in table.splitlines()[1:]]
    assert {f"{last:02X}00007F" for last in (2, 3)} <= {one.partition(":")[0] for one in sockets}
    for one in groups:
        one.close()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("init_weights_update_group", {}, "master_port"),
        (
            "init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
             "backend": "smoke"},
            "smoke",
        ),
        ("destroy_weights_update_group", {"group_name": "none"}, "no group 'none'"),
        ("end_weight_update", {}, "no update is open"),
        ("update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": []}, "0 dtypes"),
        ("update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "no update is open"),
        (
            "update_weights_from_distributed",
            {"names": [], "dtypes": [], "shapes": [], "load_format": "smoke"}, "load_format = 'smoke'",
        ),
    ],
)  # fmt: skip
async def test_what_is_refused_is_named(stage: Stage, path: str, body: Any, words: str) -> None:
    status, reply = await stage.client.post(f"/{path}", body)
    assert status == 400
    assert words in str(reply)


async def test_one_update_at_a_time(stage: Stage) -> None:
    assert (await stage.client.post("/begin_weight_update"))[0] == 200
    status, reply = await stage.client.post("/begin_weight_update")
    assert (status, "is already open" in str(reply)) == (400, True)
    assert not await stage.send(4)
    assert await stage.send(5)
    assert stage.is_live()
