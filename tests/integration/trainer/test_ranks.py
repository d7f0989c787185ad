"""Several trainer ranks, as processes over gloo: results equal those of one, and no rank hangs."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.e2e.runs import REPO, gone
from tests.ranked import train
from tests.tiny import make_tiny_model
from tests.unit.trainer.learning_fixtures import VOCABULARY, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import CheckpointError, StartError, TrainingError
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.huggingface import write_merged
from tidegate.trainer.distributed import fsdp
from tidegate.trainer.distributed.rank_main import RankInit
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.processes.rank_process import rank_processes

pytestmark = pytest.mark.slow
UNCLIPPED = 1e9


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def settings(ranks: int, **more: Any) -> TrainerSettings:
    return TrainerSettings(ranks=ranks, max_grad_norm=UNCLIPPED, microbatch_tokens=100, **more)


@asynccontextmanager
async def opened(
    base: Path, logs: Path, timeout_s: float = 60, count: int = 2, **more: Any
) -> AsyncIterator[tuple[Policy, RankProcesses]]:
    """A policy on several ranks, rank 0 of which is this process."""
    ranks = RankProcesses(settings(count, **more), rank_processes(count, logs), timeout_s=timeout_s)
    watching: list[asyncio.Task[None]] = []

    def watch(job: Coroutine[Any, Any, None], _: str) -> None:
        watching.append(asyncio.create_task(job))

    try:
        policy = await ranks.open(base, 0, watch)
        yield policy, ranks
    finally:
        for task in watching:
            task.cancel()
            with suppress(asyncio.CancelledError, TrainingError):
                await task
        await ranks.close()


def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
    policy.backward(rows, 3)
    return policy.optimizer_step()


def parameters(directory: Path) -> dict[str, torch.Tensor]:
    return Policy.load(directory, settings(1)).weights()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """‖a − b‖ ÷ ‖b‖ over all tensors."""
    assert one.keys() == other.keys()
    gap = torch.stack([(one[name] - other[name]).norm() for name in other]).norm()
    return float(gap / torch.stack([value.norm() for value in other.values()]).norm())


VARIANTS: dict[str, dict[str, Any]] = {
    "truncated": {},
    "grpo": {"loss": {"name": "grpo"}, "activation_checkpointing": True, "ess_scaling": True},
    "lora": {"lora": {"rank": 4}},
    "streaming": {"minibatches": 2, "streaming": True},
    "bfloat16": {"compute_dtype": "bfloat16"},
}


def test_two_ranks_equal_one(base: Path, tmp_path: Path) -> None:
    """The first gradient within 1e-6 relative, 20 steps of plain SGD within 1e-5. Passes in bfloat16 differ
    by its rounding: FSDP casts parameters, one process what goes into its products."""
    fixed = {"loss": {"name": "decoupled_ppo"}, "minibatches": 2, "reference_model": base, "kl_coef": 0.1}
    variants = VARIANTS | {"fixed policies": fixed}
    sampler = Policy.load(base, settings(1))
    batches = [sampled(sampler, make_rows(7 + number % 3, seed=number)) for number in range(20)]
    found, alone = trained(base, tmp_path, variants, batches)
    rounded = found.pop("bfloat16")
    for name in found:
        are_the_same(found[name], alone[name])
    for one in (rounded, alone["bfloat16"]):
        assert 1e-4 < apart(one["gradients"], alone["truncated"]["gradients"]) < 0.03
        assert 1e-4 < apart(one["parameters"], alone["truncated"]["parameters"]) < 0.01
        assert {tensor.dtype for tensor in one["parameters"].values()} == {torch.float32}


def test_two_replicas_of_two_ranks_equal_one(base: Path, tmp_path: Path) -> None:
    """FSDP adds gradients over the ranks of a replica, and once for all microbatches over replicas."""
    sampler = Policy.load(base, settings(1))
    batches = [sampled(sampler, make_rows(7 + number, seed=number)) for number in range(3)]
    variants = {name: VARIANTS[name] for name in ("truncated", "lora", "streaming")}
    found, alone = trained(base, tmp_path, variants, batches, ranks=4, replicas=2)
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    for name in variants:
        are_the_same(found[name], alone[name])
        units = layers + (name != "lora")  # only layers have adapters
        shares = 2 if name == "streaming" else 1
        assert found[name]["additions"] == units * shares * len(batches)


def test_two_ranks_replay_experts_as_one_does(tmp_path: Path) -> None:
    """Experts at random, so that other ones, or those of another row, give other gradients."""
    base = tmp_path / "base"
    make_tiny_model(base, VOCABULARY, hidden=32, family="qwen3_moe", spread=0.05)
    rng, batches = np.random.default_rng(0), [make_rows(7, seed=number) for number in range(2)]
    for row in (row for rows in batches for row in rows):
        row.experts = rng.permuted(np.tile(np.arange(4, dtype=np.uint16), (len(row.ids), 2, 1)), axis=2)
        row.experts = row.experts[:, :, :2].reshape(len(row.ids), -1)
    variants = {
        "replayed": {"routing_replay": True},
        "recomputed": {"routing_replay": True, "activation_checkpointing": True},
        "not replayed": {},
    }
    found, alone = trained(base, tmp_path, variants, batches)
    for name in variants:
        assert apart(found[name]["gradients"], alone[name]["gradients"]) <= 1e-5, name
    assert apart(alone["not replayed"]["gradients"], alone["replayed"]["gradients"]) > 0.01


def trained(
    base: Path,
    tmp_path: Path,
    variants: dict[str, dict[str, Any]],
    batches: list[list[TrainingSequence]],
    ranks: int = 2,
    replicas: int = 1,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `tests.ranked.train` returns for each variant on several ranks, and on one."""
    init = RankInit(settings(ranks, replicas=replicas, learning_rate=0.01), base, 0, ("", 0), 60)
    (tmp_path / "plan.pickle").write_bytes(pickle.dumps((init, variants, batches)))
    command = [sys.executable, "-m", "tests.ranked", str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], cwd=REPO) for rank in range(ranks)]
    try:
        alone = {
            name: train(Policy.load(base, settings(1, learning_rate=0.01, **changed)), batches)
            for name, changed in variants.items()
        }
        assert [process.wait(100) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return torch.load(tmp_path / "found.pt", weights_only=False), alone


def sampled(policy: Policy, rows: list[TrainingSequence]) -> list[TrainingSequence]:
    """The rows as if the policy had sampled them: far from it a step's rounding is blown up by the next."""
    return [replace(row, logprobs=one) for row, one in zip(rows, policy.logprobs(rows), strict=True)]


def are_the_same(found: dict[str, Any], alone: dict[str, Any]) -> None:
    start = alone["start"]
    assert apart(found["gradients"], alone["gradients"]) <= 1e-6
    one, other = found["parameters"], alone["parameters"]
    assert max(float((one[name] - other[name]).abs().max()) for name in start) <= 1e-5
    assert max(float((one[name] - start[name]).abs().max()) for name in start) > 1e-3
    for mine, theirs in zip(found["metrics"], alone["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "lag_kl"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
        assert mine["tokens/trained"] == theirs["tokens/trained"]
    assert found["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"count": 3, "lora": {"rank": 4}, "activation_checkpointing": True},
        {"count": 4, "replicas": 2},
        {"family": "qwen3_moe"},
    ],
    ids=["two", "three", "replicas", "experts"],
)
async def test_a_checkpoint_is_the_same_for_any_number_of_ranks(
    base: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    """AdamW's moments, an adapter and all: written by several ranks and gone on from by one, and the reverse.

    Of the adapter's moments, with four rows, the last of three ranks has none.
    """
    more = dict(more)
    if family := more.pop("family", None):
        base = make_model(tmp_path / "base", family=family)
    first, second, third = (make_rows(6, seed=number) for number in range(3))
    fixed = {name: value for name, value in more.items() if name not in ("count", "replicas")}
    alone = Policy.load(base, settings(1, learning_rate=1e-3, **fixed), seed=9)
    sent: list[dict[str, torch.Tensor]] = []
    async with opened(base, tmp_path, learning_rate=1e-3, **more) as (lead, _):

        def by_several() -> None:
            step(lead, first)
            write = checkpoints.begin(tmp_path, 1, lead, {})
            step(lead, second)  # what is written is the policy before this step
            write()

        await asyncio.to_thread(by_several)
        saved = checkpoints.latest(tmp_path)
        assert saved is not None
        saved.verify()
        files = {name: (saved.path / name).stat().st_size for name in saved.files or ()}
        assert {"tokenizer.json", "optimizer/.metadata", "optimizer/__1_0.distcp"} <= files.keys()
        assert files["trainer.pt"] < files["model.safetensors"], "it has no moments"
        checkpoints.load(saved, alone)
        step(alone, second)
        one = checkpoints.read(checkpoints.save(tmp_path, 2, alone, {}))

        def go_on() -> None:
            lead.save_weights(tmp_path / "two")
            checkpoints.load(saved, lead)
            step(lead, second)
            lead.save_weights(tmp_path / "again")
            checkpoints.load(one, lead)
            step(lead, third)
            next(lead.weight_buckets(10_000))  # and the rest is nobody's: the ranks stay in step
            sent.extend(lead.weight_buckets(10_000))
            lead.save_weights(tmp_path / "three")
            if "lora" in more:
                lead.save_adapter(tmp_path / "adapter")

        await asyncio.to_thread(go_on)
    three = parameters(tmp_path / "three")
    if "lora" in more:
        write_merged(tmp_path / "adapter", tmp_path / "merged")
        assert apart(parameters(tmp_path / "merged"), three) <= 1e-6
    assert len(sent) > 2
    assert [name for bucket in sent for name in bucket] == list(three), "each once"
    assert all(torch.equal(one, three[name]) for bucket in sent for name, one in bucket.items())
    assert apart(parameters(tmp_path / "two"), parameters(one.path)) <= 1e-6
    assert apart(parameters(tmp_path / "again"), parameters(tmp_path / "two")) == 0
    step(alone, third)
    assert apart(parameters(tmp_path / "three"), alone.weights()) <= 1e-6
    assert apart(parameters(tmp_path / "three"), parameters(one.path)) > 1e-4
    (saved.path / "optimizer" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step_1/trainer.pt is not .*rank 0: No such file.*__1_0"):
        checkpoints.load(saved, alone)


async def test_a_rank_killed_while_it_writes_ends_the_run_by_name_and_leaves_the_last_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes into a pipe that nobody reads. Steps and publishes go on meanwhile."""

    def prepare(directory: Path, **_: object) -> None:
        directory.mkdir(parents=True)
        os.mkfifo(directory / "__1_0.distcp")

    async with opened(base, tmp_path, learning_rate=1e-3) as (lead, ranks):

        def save_and_go_on() -> Callable[[], Path]:
            step(lead, make_rows(5))
            checkpoints.save(tmp_path, 1, lead, {})
            monkeypatch.setattr(fsdp, "shutil", SimpleNamespace(rmtree=prepare))
            write = checkpoints.begin(tmp_path, 2, lead, {})
            step(lead, make_rows(5))
            lead.save_weights(tmp_path / "published")
            return write

        write = await asyncio.to_thread(save_and_go_on)
        process = ranks.processes[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match=r"trainer rank 1 was killed by SIGKILL.*--resume"):
            await asyncio.wait_for(asyncio.to_thread(write), 30)
    newest = checkpoints.latest(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert checkpoints.prune(tmp_path, keep=1) == [tmp_path / "checkpoints" / ".step_2.optimizer"]


async def test_a_rank_that_cannot_write_is_named_and_training_can_go_on(base: Path, tmp_path: Path) -> None:
    """A file that may not grow, as on a full disk, and one that rank 0 does not see."""
    async with opened(base, tmp_path, learning_rate=1e-3) as (lead, ranks):
        process = ranks.processes[0]._process
        assert process is not None
        _, largest = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)

        def with_files_of(most: int) -> None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, largest))
            checkpoints.save(tmp_path, 1, lead, {})

        await asyncio.to_thread(step, lead, make_rows(5))
        with pytest.raises(CheckpointError, match=r"step_1 cannot be written: .*rank 1: File too large"):
            await asyncio.to_thread(with_files_of, 20_000)
        assert list((tmp_path / "checkpoints").iterdir()) == []
        await asyncio.to_thread(with_files_of, largest)

        def to_another_disk() -> None:
            write = checkpoints.begin(tmp_path, 2, lead, {})
            assert isinstance(write, partial)
            write.args[2].wait()
            (tmp_path / "checkpoints" / ".step_2.optimizer" / "__1_0.distcp").unlink()
            write()

        with pytest.raises(CheckpointError, match=r"step_2.*all ranks must share.*__1_0.distcp"):
            await asyncio.to_thread(to_another_disk)
        assert (await asyncio.to_thread(step, lead, make_rows(5)))["skipped"] == 0


async def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(base: Path, tmp_path: Path) -> None:
    rows = make_rows(5)
    rows[2].advantages[:] = float("nan")
    rows[2].group_id = "bad"
    async with opened(base, tmp_path, learning_rate=1e-3) as (lead, _):
        assert (await asyncio.to_thread(step, lead, rows))["skipped"] == 1
        assert lead.non_finite == ["bad"]
        await asyncio.to_thread(lead.save_weights, tmp_path / "same")
        assert (await asyncio.to_thread(step, lead, make_rows(5)))["skipped"] == 0
    assert apart(parameters(tmp_path / "same"), parameters(base)) == 0


async def test_a_rank_that_exits_is_named_and_no_other_rank_waits(base: Path, tmp_path: Path) -> None:
    async with opened(base, tmp_path) as (lead, ranks):
        process = ranks.processes[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(TrainingError, match=r"trainer rank 1 was killed by SIGKILL.*--resume"):
                await asyncio.wait_for(asyncio.to_thread(step, lead, make_rows(5)), 30)


async def test_a_rank_that_hangs_is_not_waited_for_forever(base: Path, tmp_path: Path) -> None:
    async with opened(base, tmp_path, timeout_s=3) as (lead, ranks):
        process = ranks.processes[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(TrainingError, match="lost each other"):
            await asyncio.wait_for(asyncio.to_thread(step, lead, make_rows(5)), 40)
        os.kill(process.pid, signal.SIGKILL)


async def test_a_model_that_cannot_be_loaded_is_said_and_no_rank_is_left(tmp_path: Path) -> None:
    ranks = RankProcesses(settings(2), rank_processes(2, tmp_path))
    with pytest.raises(StartError, match=r"no model found"):
        await ranks.open(tmp_path / "nowhere", 0, lambda job, _: job.close())
    process = ranks.processes[0]._process
    assert process is not None
    await ranks.close()
    assert gone(process.pid, 5)


def test_a_rank_loads_its_own_shard_only(tmp_path: Path) -> None:
    """Only rank 0 has the whole model in its memory, and only while it is read."""
    config = Qwen3Config(
        vocab_size=4000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, head_dim=64,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    # In bfloat16: weights that are float32 in the file would be read only where they are used.
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    policy = Policy.load(tmp_path / "model", settings(1, learning_rate=1e-3))
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    policy._optimizer.step()
    policy.save_state(tmp_path / "trainer.pt")
    size = sum(parameter.nbytes for parameter in policy.model.parameters())
    del policy
    command = [sys.executable, "-m", "tests.host_memory", str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=REPO, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    (_, _, lead), (loaded, resumed, saved) = (map(int, one.split()[-3:]) for one in told)
    assert loaded < 0.8 * size, "its half of the weights, and the largest tensor"
    assert resumed < 1.9 * size, "its half of weights and both moments"
    assert saved < 2.9 * size, "and a copy of its moments"
    # 3.5 by count: half of weights and moments, a copy of these moments, the gathered weights. Its heap keeps
    # about half of the weights that it converted; all moments would be another 1.
    assert lead < 4.4 * size, "and the weights, but not all moments"
