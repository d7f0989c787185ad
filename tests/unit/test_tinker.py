"""The backend of a Tinker service: rows on the wire, exactly one step, snapshots, and the engine."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import REPO, fake_tinker
from tests import tinker_conversation as conversation
from tests.unit.trainer.learning_fixtures import make_model, make_row
from tests.waiting import eventually
from tidegate import failpoints
from tidegate.config import Settings
from tidegate.engine.requests.request import WeightUpdate
from tidegate.engine.validation import RequestError
from tidegate.errors import ConfigError, EngineError, StartError, TidegateError, TrainingError
from tidegate.launch import check, check_model
from tidegate.plan.memory import memory_plan
from tidegate.plan.shape import read_shape
from tidegate.settings.tinker import TinkerService
from tidegate.tinker import policy as policy_module
from tidegate.tinker import service as service_module
from tidegate.tinker.engine import TinkerEngine
from tidegate.tinker.policy import TinkerPolicy, datum
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.replay import Replay
from tidegate.weights.files import WeightsError


@pytest.fixture(autouse=True)
def sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", fake_tinker)
    monkeypatch.setattr(policy_module, "backoff_s", lambda *_: 0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


def settings_of(base: Path, **tinker: Any) -> Settings:
    return Settings.model_validate(
        {
            "model": {"path": base},
            "engine": {"kind": "tinker"},
            "trainer": {
                "backend": "tinker", "learning_rate": 1e-3, "lora": {"rank": 4},
                "tinker": {"base_model": "base", "base_url": "http://service", **tinker},
            },
        }
    )  # fmt: skip


def policy_at(service: fake_tinker.Service, base: Path, **tinker: Any) -> TinkerPolicy:
    return TinkerPolicy(settings_of(base, **tinker).trainer, base, 0, "key", lambda: service)


def batch(seed: int) -> list[TrainingSequence]:
    rng = np.random.default_rng(seed)
    return [make_row(rng, group=f"g{number}") for number in range(3)]


def test_a_row_goes_to_the_service_with_its_own_ids_logprobs_and_advantages() -> None:
    row = make_row(np.random.default_rng(0))
    end = row.inputs + 1
    sent = datum(fake_tinker, row, 0.5)
    inputs = {name: np.array(value.data) for name, value in sent.loss_fn_inputs.items()}
    assert sent.model_input.ids == row.ids[: end - 1].tolist()
    assert inputs["target_tokens"].tolist() == row.ids[1:end].tolist()
    assert inputs["logprobs"] == pytest.approx(row.logprobs[1:end])
    assert inputs["advantages"] == pytest.approx(np.where(row.mask, row.advantages * 0.5, 0)[1:end])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_either_reduction_of_a_service_gives_the_mean_over_trained_tokens(base: Path, reduction: str) -> None:
    rows, policy = batch(1), policy_at(fake_tinker.Service(), base, reduction=reduction)
    sent = [datum(fake_tinker, row, scale) for row, scale in zip(rows, policy._scales(rows), strict=True)]
    sums = [sum(one.loss_fn_inputs["advantages"].data) for one in sent]
    means = [sum(one.loss_fn_inputs["advantages"].data) / len(one.model_input.ids) for one in sent]
    at_service = sum(sums) if reduction == "sum" else sum(means) / len(rows)
    expected = sum(row.advantages[row.mask].sum() for row in rows) / sum(row.trained for row in rows)
    assert at_service == pytest.approx(expected, rel=1e-5)


def test_a_step_has_the_optimiser_of_the_settings(base: Path) -> None:
    service = fake_tinker.Service()
    trainer = settings_of(base).trainer
    changed = {"beta1": 0.25, "max_grad_norm": 0.5, "weight_decay": 0.1}
    policy = TinkerPolicy(trainer.model_copy(update=changed), base, 0, "key", lambda: service)
    policy.backward(batch(2), 3)
    policy.optimizer_step()
    (adam,) = service.adam
    assert (adam.beta1, adam.beta2, adam.learning_rate) == (0.25, 0.999, 1e-3)
    assert (adam.grad_clip_norm, adam.weight_decay) == (0.5, 0.1)


def test_the_loss_is_that_of_the_policy_before_the_step(base: Path) -> None:
    rows, policy = batch(2), policy_at(fake_tinker.Service(logprob=-1.5), base)
    policy.backward(rows, 3)
    metrics = policy.optimizer_step()
    ratios = [np.exp(-1.5 - row.logprobs[row.mask].astype(float)) for row in rows]
    total = sum((ratio * row.advantages[row.mask]).sum() for ratio, row in zip(ratios, rows, strict=True))
    assert metrics["loss"] == pytest.approx(-total / sum(row.trained for row in rows))
    assert metrics["tokens/trained"] == sum(row.trained for row in rows)
    drift = sum(np.abs(-1.5 - row.logprobs[row.mask]).sum() for row in rows)
    assert metrics["logprob_drift"] == pytest.approx(drift / metrics["tokens/trained"])
    assert not metrics["skipped"]


@pytest.mark.parametrize("at", range(1, 12))
def test_a_call_that_fails_after_its_effect_takes_no_step_twice(base: Path, tmp_path: Path, at: int) -> None:
    def train(service: fake_tinker.Service, run: Path) -> float:
        policy = policy_at(service, base)
        for number in range(3):
            policy.backward(batch(number), number)
            policy.optimizer_step()
            policy.save_weights(run / "weights" / f"v{number}")
        assert policy.steps == 3
        assert policy._state is not None
        assert policy._sampler is not None
        assert service.states[policy._sampler] == service.states[policy._state]
        return service.states[policy._state]

    def fail(number: int, name: str) -> None:
        if number == at:
            raise fake_tinker.APIConnectionError(f"the reply to {name} was lost")

    assert train(fake_tinker.Service(fault=fail), tmp_path / "a") == train(
        fake_tinker.Service(), tmp_path / "b"
    )


def test_a_refused_step_is_tried_once_more_and_then_ends_the_run(base: Path) -> None:
    def refuse(number: int, name: str) -> None:
        if name == "forward_backward":
            raise fake_tinker.BadRequestError("no such loss")

    service = fake_tinker.Service(fault=refuse)
    policy = policy_at(service, base)
    policy.backward(batch(0), 0)
    with pytest.raises(TrainingError, match="no such loss; the step was not taken"):
        policy.optimizer_step()
    assert service.calls.count("forward_backward") == 2


def test_a_batch_without_finite_logprobs_is_skipped_with_its_gradients(base: Path) -> None:
    service = fake_tinker.Service(logprob=float("nan"))
    policy = policy_at(service, base)
    policy.backward(batch(0), 0)
    assert policy.optimizer_step()["skipped"] == 1.0
    assert policy.untrained == policy.non_finite == ["g0", "g1", "g2"]
    service.logprob = -1.0
    policy.backward(batch(1), 0)
    policy.optimizer_step()
    clean = policy_at(other := fake_tinker.Service(), base)
    clean.backward(batch(1), 0)
    clean.optimizer_step()
    assert service.states[policy._state or ""] == other.states[clean._state or ""]


def test_a_checkpoint_names_the_state_from_which_another_process_goes_on(base: Path, tmp_path: Path) -> None:
    service = fake_tinker.Service()
    policy = policy_at(service, base)
    policy.backward(batch(0), 0)
    policy.optimizer_step()
    saved = checkpoints.read(checkpoints.save(tmp_path, 1, policy, {}))
    saved.verify()
    policy.backward(batch(1), 1)
    policy.optimizer_step()  # not committed
    resumed = policy_at(service, base)
    checkpoints.load(saved, resumed)
    assert resumed.steps == 1
    resumed.backward(batch(1), 1)
    resumed.optimizer_step()
    assert service.states[resumed._state or ""] == service.states[policy._state or ""]


def test_snapshots_and_states_that_no_directory_names_are_deleted(base: Path, tmp_path: Path) -> None:
    service = fake_tinker.Service()
    policy = policy_at(service, base)
    for number in range(4):
        policy.backward(batch(number), number)
        policy.optimizer_step()
        policy.save_weights(tmp_path / "weights" / f"v{number}")
        for old in sorted((tmp_path / "weights").glob("v*"))[:-2]:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
    # The oldest goes with the next version.
    assert len([path for path in service.states if "sampler" in path]) == 3
    assert len([path for path in service.states if "/weights/" in path]) == 3
    assert policy._state in service.states


def test_a_checkpoint_that_a_kill_left_incomplete_stops_no_resume(base: Path, tmp_path: Path) -> None:
    service = fake_tinker.Service()
    policy = policy_at(service, base)
    saved = checkpoints.read(checkpoints.save(tmp_path, 1, policy, {}))
    for name in ("trainer.pt", "tinker.json"):
        (tmp_path / "checkpoints" / "step_2").mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / "step_2" / name).write_text("")
    resumed = policy_at(service, base)
    checkpoints.load(saved, resumed)
    resumed.save_weights(tmp_path / "weights" / "v1")
    assert not service.deleted


def test_states_of_a_checkpoint_removed_after_a_resume_are_deleted_later(base: Path, tmp_path: Path) -> None:
    service = fake_tinker.Service()
    policy = policy_at(service, base)
    policy.save_weights(tmp_path / "weights" / "v0")
    old = policy._sampler
    policy.backward(batch(0), 0)
    policy.optimizer_step()
    saved = checkpoints.read(checkpoints.save(tmp_path, 1, policy, {}))
    resumed = policy_at(service, base)
    checkpoints.load(saved, resumed)
    (tmp_path / "weights" / "v0" / "tinker.json").unlink()
    resumed.save_weights(tmp_path / "weights" / "v1")  # has its snapshot, and opens no session
    resumed.backward(batch(1), 1)
    resumed.optimizer_step()
    resumed.save_weights(tmp_path / "weights" / "v2")
    assert old in service.deleted


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (fake_tinker.APIConnectionError("no reply"), 2), (fake_tinker.NotFoundError("no such call"), 1),
        (ValueError("a path of skyrl-tx"), 1),
    ],
)  # fmt: skip
def test_a_deletion_that_failed_is_repeated_unless_the_service_refuses_it(
    base: Path, tmp_path: Path, error: Exception, times: int
) -> None:

    def fail(number: int, name: str) -> None:
        if name == "delete" and service.calls.count("delete") == 1:
            raise error

    service = fake_tinker.Service(fault=fail)
    policy = policy_at(service, base)
    for number in range(3):
        policy.backward(batch(number), number)
        policy.optimizer_step()
        policy.save_weights(tmp_path / "weights" / "v0")
    first = service.deleted[0]
    assert service.deleted.count(first) == times
    assert first not in policy._saved


def test_a_session_that_does_not_open_ends_with_the_outage(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, never = fake_tinker.Service(), threading.Event()
    monkeypatch.setattr(service, "create_lora_training_client", lambda **_: never.wait(60))
    settings = settings_of(base).trainer.model_copy(update={"outage_s": 0.05})
    policy = TinkerPolicy(settings, base, 0, "key", lambda: service)
    policy.backward(batch(0), 0)
    with pytest.raises(TrainingError, match=r"TimeoutError: no reply within 0\.05 s"):
        policy.optimizer_step()
    never.set()


def test_a_run_does_not_begin_with_another_version_than_its_engines(base: Path, tmp_path: Path) -> None:
    service = fake_tinker.Service()
    version = policy_at(service, base).save_weights(tmp_path / "weights" / "v0")
    with pytest.raises(ConfigError, match=r"model\.path = .*v0"):
        policy_at(service, version)


def test_the_stand_in_answers_as_the_recorded_service() -> None:
    service = fake_tinker.Service(of_skyrl=True)
    said = conversation.hold(
        fake_tinker, lambda: service, asyncio.run, "base", lambda: setattr(service, "away", True),
        service.restart,
    )  # fmt: skip
    assert said == conversation.recorded()


# -- kill -9

KILLED = (
    "tinker.opened", "tinker.backward", "tinker.step", "tinker.state", "tinker.sampler", "tinker.deleted",
    "checkpoint.weights.before", "checkpoint.weights.after", "checkpoint.state.after",
    "checkpoint.marker.before", "checkpoint.marker.after", "checkpoint.unmarked.after",
)  # fmt: skip
STEPS = 4


def train_in_process(base: Path, place: Path, failpoint: str) -> None:
    """Trains on batch N in step N + 1, whose gradient is 10 ** N, from the last checkpoint to the end."""
    os.environ[failpoints.VARIABLE] = failpoint
    sys.modules["tinker"] = fake_tinker  # type: ignore[assignment]
    policy = policy_at(fake_tinker.Service(states=fake_tinker.Files(place / "service")), base)
    run = place / "run"
    if (saved := checkpoints.latest(run)) is not None:
        checkpoints.load(saved, policy)
    for number in range(policy.steps, STEPS):
        rows = batch(number)
        for row in rows:
            row.advantages[:] = 10.0**number
        policy.backward(rows, number)
        policy.optimizer_step()
        policy.save_weights(run / "weights" / f"v{number % 2}")
        checkpoints.save(run, number + 1, policy, {})
        checkpoints.prune(run, 1)


@pytest.mark.parametrize("failpoint", KILLED)
def test_a_trainer_that_is_killed_takes_each_step_once(base: Path, tmp_path: Path, failpoint: str) -> None:
    context, codes = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload(["tests.unit.test_tinker"])
    for passes in (f"{failpoint}:1", f"{failpoint}:2", ""):
        process = context.Process(target=train_in_process, args=(base, tmp_path, passes))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
    # A session is opened without a state once, and a resume goes on from one.
    assert codes == [-9, 0 if failpoint == "tinker.opened" else -9, 0]
    states, run = fake_tinker.Files(tmp_path / "service"), tmp_path / "run"
    last = checkpoints.latest(run)
    assert last is not None
    state = json.loads((last.path / "trainer.pt").read_text())["state"]
    samplers = [json.loads(file.read_text())["sampler"] for file in run.glob("weights/*/tinker.json")]
    # Each digit is the number of times that a step was taken: lost 0, doubled 0.
    assert (last.step, round(states[state])) == (STEPS, 1111)
    assert {round(states[path]) for path in samplers} == {111, 1111}


# -- the engine


async def engine_at(
    service: fake_tinker.Service, base: Path, monkeypatch: pytest.MonkeyPatch
) -> TinkerEngine:
    monkeypatch.setattr("tidegate.tinker.engine.connect", lambda *_: service)
    engine = TinkerEngine(TinkerService(base_model="base"), base, 7, "key")
    await engine.start()
    return engine


def body(**params: Any) -> dict[str, Any]:
    return {"input_ids": [3, 4], "return_logprob": True, "sampling_params": {"max_new_tokens": 4, **params}}


async def test_a_reply_has_the_ids_logprobs_and_version_of_its_snapshot(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = fake_tinker.Service(replies=[[5, 6, 7, 8], [5, 6, 7, 8]], gate=asyncio.Event())
    engine = await engine_at(service, base, monkeypatch)
    generation = engine.read(body(sampling_seed=2**40 + 1, temperature=0.5, ignore_eos=True))
    running = asyncio.create_task(engine.sample(generation))
    await eventually(lambda: bool(service.prompts))
    policy = policy_at(service, base)
    directory = await asyncio.to_thread(policy.save_weights, tmp_path / "weights" / "v8")
    await engine.load_weights(WeightUpdate(directory, "8", keep_cache=False, abort_all=False))
    assert service.gate is not None
    service.gate.set()
    first = await running
    second = await engine.sample(engine.read(body(ignore_eos=True)))
    assert service.prompts == [[3, 4], [3, 4]]
    assert service.params[0].seed == (2**40 + 1) % 2**31
    assert service.params[0].temperature == 0.5
    assert first["output_ids"] == [5, 6, 7, 8]
    assert [pair[0] for pair in first["meta_info"]["output_token_logprobs"]] == [-0.5] * 4
    assert first["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]
    assert second["meta_info"]["weight_versions"] == [{"version": "8", "start": 0, "end": 4}]
    assert engine._current is not None
    assert engine._current.client.what == {"model_path": policy._sampler}


async def test_a_reply_ends_at_its_first_stop_token_or_string(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = fake_tinker.Service(replies=[[5, 6, 7, 8], [5, 6, 7, 8]])
    engine = await engine_at(service, base, monkeypatch)
    by_token = await engine.sample(engine.read(body(stop_token_ids=[6])))
    by_text = await engine.sample(engine.read(body(stop=["w6"], ignore_eos=True)))
    assert 6 in service.params[0].stop
    assert by_token["output_ids"] == by_text["output_ids"] == [5, 6]
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": 6}
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": "w6"}


async def test_a_reply_that_ends_without_a_reason_is_no_reply(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_at(fake_tinker.Service(replies=[[5, 6]]), base, monkeypatch)
    with pytest.raises(EngineError, match="ended a reply after 2 of 4 tokens"):
        await engine.sample(engine.read(body(ignore_eos=True)))


async def test_an_aborted_request_has_no_tokens(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = fake_tinker.Service(replies=[[5, 6, 7, 8]], gate=asyncio.Event())
    engine = await engine_at(service, base, monkeypatch)
    running = asyncio.create_task(engine.sample(engine.read({**body(), "rid": "a1"})))
    await eventually(lambda: bool(service.prompts))
    assert await engine.abort("a") == 1
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_snapshot_that_a_restart_of_the_service_lost_is_taken_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = fake_tinker.Service(of_skyrl=True)
    policy = policy_at(service, base)
    policy.backward(batch(0), 0)
    policy.optimizer_step()
    directory = policy.save_weights(tmp_path / "weights" / "v1")
    engine = await engine_at(service, base, monkeypatch)
    await engine.load_weights(WeightUpdate(directory, "8", keep_cache=False, abort_all=False))
    service.restart()
    replies = await asyncio.gather(*(engine.sample(engine.read(body(ignore_eos=True))) for _ in range(4)))
    versions = [one["meta_info"]["weight_versions"] for one in replies]
    assert versions == [[{"version": "8", "start": 0, "end": 4}]] * 4
    assert engine._current is not None
    taken = engine._current.client.what["model_path"]
    assert taken != policy._sampler
    assert service.states[taken] == service.states[policy._sampler or ""]
    assert service.calls.count("save_weights_for_sampler") == 2
    service.restart()
    with pytest.raises(EngineError, match="not loaded"):  # at once again: the request may be at fault
        await engine.sample(engine.read(body(ignore_eos=True)))


async def test_requests_that_wait_for_the_end_of_a_pause_are_aborted_too(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = fake_tinker.Service()
    engine = await engine_at(service, base, monkeypatch)
    await engine.pause("retract")
    waiting = [asyncio.create_task(engine.sample(engine.read({**body(), "rid": rid}))) for rid in "ab"]
    await eventually(lambda: len(engine._running) == 2)
    assert await engine.abort("a") == 1
    await engine.pause("abort")
    async with asyncio.timeout(10):
        replies = await asyncio.gather(*waiting)
    assert [one["meta_info"]["finish_reason"]["type"] for one in replies] == ["abort", "abort"]
    assert not service.prompts


async def test_a_snapshot_that_does_not_open_leaves_the_version(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = fake_tinker.Service()
    engine = await engine_at(service, base, monkeypatch)
    monkeypatch.setattr("tidegate.tinker.engine.OPEN_S", 0.01)
    monkeypatch.setattr(service, "create_sampling_client_async", lambda **_: asyncio.Event().wait())
    with pytest.raises(EngineError, match=r"TimeoutError: no reply within 0\.01 s"):
        await engine.load_weights(WeightUpdate(base, "8", keep_cache=False, abort_all=False))
    assert (await engine.info())["weight_version"] == "7"


@pytest.mark.parametrize("params", [{"n": 2}, {"min_p": 0.1}, {"presence_penalty": 1.0}])
async def test_what_a_service_does_not_have_is_refused_by_name(
    base: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    engine = await engine_at(fake_tinker.Service(), base, monkeypatch)
    with pytest.raises(RequestError, match=next(iter(params))):
        engine.read(body(**params))


async def test_a_directory_without_a_snapshot_name_leaves_the_version(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_at(fake_tinker.Service(), base, monkeypatch)
    (tmp_path / "tinker.json").write_text("{}")
    with pytest.raises(WeightsError, match="not a version of a Tinker service"):
        await engine.load_weights(WeightUpdate(tmp_path, "8", keep_cache=False, abort_all=False))
    assert (await engine.info())["weight_version"] == "7"


# -- the connection and the settings


async def test_training_calls_are_sent_once_unless_they_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(holder=SimpleNamespace(execute_with_retries=None))
    monkeypatch.setattr(fake_tinker, "ServiceClient", lambda **_: client, raising=False)
    monkeypatch.setattr(asyncio, "sleep", lambda *_: asyncio.wait_for(asyncio.Event().wait(), 0.01))
    errors: list[Exception] = [fake_tinker.APIConnectionError()]

    async def call() -> None:
        raise errors.pop(0)

    service_module.connect(TinkerService(base_model="base"), "key", once_s=60.0)
    with pytest.raises(fake_tinker.APIConnectionError):
        await client.holder.execute_with_retries(call)
    assert not errors


async def test_a_service_that_refuses_for_too_long_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(holder=SimpleNamespace(execute_with_retries=None))
    monkeypatch.setattr(fake_tinker, "ServiceClient", lambda **_: client, raising=False)

    async def call() -> None:
        raise fake_tinker.RateLimitError

    service_module.connect(TinkerService(base_model="base"), "key", once_s=0.0)
    with pytest.raises(fake_tinker.RateLimitError):
        await asyncio.wait_for(client.holder.execute_with_retries(call), 5)


def test_an_sdk_whose_repetitions_cannot_be_switched_off_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake_tinker, "ServiceClient", lambda **_: SimpleNamespace(holder=object()), raising=False
    )
    policy = TinkerPolicy(settings_of(base).trainer, base, 0, "key")
    policy.backward(batch(0), 0)
    with pytest.raises(StartError, match=r"has no `ServiceClient\.holder\.execute_with_retries`"):
        policy.optimizer_step()


def test_a_hosted_service_needs_a_key_which_is_in_no_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        service_module.service_key(TinkerService(base_model="base"))
    file = tmp_path / "key"
    file.write_text("tml-secret\n")
    assert service_module.service_key(TinkerService(api_key_file=file)) == "tml-secret"


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"tinker": {"loss": "dro"}}, "importance_sampling"),
        ({"loss": {"name": "gspo"}}, "set tinker.loss instead"),
        ({"minibatches": 2, "streaming": True}, "minibatches is not supported"),
        ({"lora": {"rank": 4, "alpha": 8}}, "lora.alpha is not supported"),
        ({"lora": {"rank": 0}}, "lora.rank and learning_rate"),
        ({"backend": "own"}, 'no effect without backend = "tinker"'),
    ],
)
def test_settings_that_the_service_does_not_have_are_refused(
    base: Path, trainer: dict[str, Any], words: str
) -> None:
    whole = settings_of(base).model_dump(exclude_defaults=True)
    whole["trainer"] |= trainer
    if "tinker" in trainer:
        whole["trainer"]["tinker"] |= {"base_model": "base"}
    with pytest.raises(ValueError, match=words):
        Settings.model_validate(whole)


def test_the_engine_must_be_at_the_service_that_trains(base: Path) -> None:
    whole = settings_of(base).model_dump(exclude_defaults=True)
    with pytest.raises(ValueError, match="set both"):
        Settings.model_validate({**whole, "engine": {}})
    with pytest.raises(ValueError, match="temperature 1 only"):
        Settings.model_validate({**whole, "sampling": {"temperature": 0.7}})


def test_a_service_needs_no_weights_and_no_memory_here_and_has_no_replay(tmp_path: Path) -> None:
    for file in (REPO / "examples/tiny_base/model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = settings_of(tmp_path)
    check(settings)
    check_model(settings, engines=True)
    assert not [item for item in memory_plan(settings, read_shape(tmp_path)) if item.owner == "trainer"]
    with pytest.raises(StartError, match="no weights"):
        check(Settings.model_validate({"model": {"path": tmp_path}}))
    with pytest.raises(TidegateError, match="the service has its weights"):
        Replay(tmp_path, settings).start()
