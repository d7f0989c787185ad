"""LoRA adapters are published without their base model, and the embedded engine serves them unmerged."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.http_app import served_app
from tests.integration.engine.engine_drive import Driver, plain_logprobs, worst_error
from tests.integration.engine.engine_http import serving
from tests.unit.trainer.learning_fixtures import make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.errors import EngineError, PublishError
from tidegate.trainer.checkpoint.best import BestCheckpoint
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.publish import engine_control
from tidegate.trainer.publish.engine_control import EngineControl, labels_of
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.weights import adapter_files, checksum
from tidegate.weights.files import WeightsError, weight_files

SETTINGS = TrainerSettings(lora={"rank": 4, "publish": "adapter"}, learning_rate=0.01)
TARGETS: tuple[list[str], list[str]] = ([], ["q_proj", "down_proj"])
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def policy(base: Path) -> Policy:
    policy = Policy.load(base, SETTINGS)
    policy.update(make_rows(3, 0), version=0)
    return policy


@pytest.fixture
async def stand(base: Path, policy: Policy, tmp_path: Path) -> AsyncIterator[tuple[Engine, Publisher]]:
    engine = Engine.load(EngineOptions(base, max_context=256, max_slots=8))

    async def nothing(*_: object) -> None:
        return

    async with serving(engine) as client:
        publisher = Publisher(
            writer=VersionWriter(directory=tmp_path / "weights", save_weights=policy.save_adapter),
            engines=lambda: [client.url],
            cancel_stale=nothing,
            quarantine=nothing,
            restore=nothing,
            current=(base, 0),
            retry_s=0.0,
        )
        yield engine, publisher


def error_against(model: Model, whole: Path, version: str = "0") -> float:
    """Largest difference between the logprobs that an engine records and those of a whole model."""
    driver = Driver(model, version=version)
    samples = [
        driver.submit([1, 2, 3 + seed % 3], max_new_tokens=30, sampling_seed=seed) for seed in range(9)
    ]
    driver.finish(samples)
    assert all(one.spans == [(version, 0, 30)] for one in samples)
    plain = AutoModelForCausalLM.from_pretrained(whole)
    return max(worst_error(plain, one) for one in samples)


async def test_published_adapters_give_the_logprobs_of_merged_weights(
    stand: tuple[Engine, Publisher], policy: Policy, base: Path, tmp_path: Path
) -> None:
    engine, publisher = stand
    for version in (1, 2, 3):
        policy.update(make_rows(3, version), version=version)
        await publisher.publish(version)
        assert engine.scheduler.version == str(version)
        merged = policy.save_weights(tmp_path / "merged")
        assert error_against(engine.model, merged) < TOLERANCE
    assert error_against(engine.model, base) > 0.1
    directory, _ = publisher.current
    names = sorted(path.name for path in directory.parent.iterdir())
    assert names == ["v000002", "v000003"], "an engine that joins may still read the version before"
    sizes = [sum(file.stat().st_size for file in one.glob("*.safetensors")) for one in (directory, merged)]
    assert sizes[0] < sizes[1] / 2


async def test_an_engine_that_restarts_has_base_model_and_adapter(
    stand: tuple[Engine, Publisher], policy: Policy, base: Path, tmp_path: Path
) -> None:
    _, publisher = stand
    await publisher.publish(1)
    weights, version = publisher.startable
    engine = Engine.load(EngineOptions(weights, max_context=256, weight_version=version))
    assert engine.detokenizer.tokenizer is not None, "the tokenizer is the base model's"
    assert (await engine.info())["model_path"] == str(base)
    assert error_against(engine.model, policy.save_weights(tmp_path / "merged"), "1") < TOLERANCE


def test_an_adapter_beside_other_weights_has_its_base_read_too(
    policy: Policy, base: Path, tmp_path: Path
) -> None:
    """A resumed run starts its engines with the merged weights of a checkpoint."""
    checkpoint = policy.save_weights(tmp_path / "checkpoint")
    policy.update(make_rows(3, 5), version=1)
    adapter, merged = policy.save_adapter(tmp_path / "v1"), policy.save_weights(tmp_path / "merged")
    model = load_model(EngineOptions(checkpoint, max_context=256, max_slots=8))
    for _ in range(2):
        model.copy_weights(model.read_weights(adapter))
        assert model.base == base
        assert error_against(model, merged) < TOLERANCE
    model.copy_weights(model.read_weights(checkpoint))
    assert error_against(model, checkpoint) < TOLERANCE, "whole weights have no adapter beside them"


async def test_an_engine_has_the_time_to_read_the_base_of_an_adapter(
    stand: tuple[Engine, Publisher], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(engine_control, "transfer_s", lambda size: float(sizes.append(size) or 0))
    await stand[1].publish(1)
    assert max(sizes) > (base / "model.safetensors").stat().st_size


def test_a_request_that_runs_while_adapters_are_loaded_has_the_version_of_each_token(
    policy: Policy, base: Path, tmp_path: Path
) -> None:
    """Also a prefix that the version before has cached is computed again."""
    wholes, model = [base], load_model(EngineOptions(base, max_context=256, max_slots=8))
    driver, prompt = Driver(model), list(range(40))
    running = [driver.submit([*prompt, seed], max_new_tokens=60, sampling_seed=seed) for seed in range(4)]
    for version in ("1", "2"):
        driver.until(lambda: len(running[0].output_ids) >= 20 * len(wholes))
        policy.update(make_rows(3, len(wholes)), version=1)
        wholes.append(policy.save_weights(tmp_path / f"merged{version}"))
        weights = model.read_weights(policy.save_adapter(tmp_path / f"v{version}"))
        driver.scheduler.load(weights, version, keep_cache=False, abort_all=False)
    late = driver.submit([*prompt, 9], max_new_tokens=20)
    driver.finish([*running, late])
    assert [version for version, _, _ in running[0].spans] == ["0", "1", "2"]
    for number, whole in enumerate(wholes):
        plain = AutoModelForCausalLM.from_pretrained(whole)
        for one in running:
            (_, start, end), own = one.spans[number], np.array(one.logprobs)
            expected = plain_logprobs(plain, one).numpy()
            assert np.abs(own - expected)[start:end].max() < TOLERANCE
    assert worst_error(plain, late) < TOLERANCE


def make_versions(base: Path, directory: Path, names: str = "ab") -> dict[str, Path]:
    """Writes an adapter for each name to a version `v1`; returns the merged models, and the base as ""."""
    merged = {"": base}
    for seed, name in enumerate(names):
        settings = SETTINGS.model_copy(
            update={"lora": SETTINGS.lora.model_copy(update={"rank": 2 + seed, "targets": TARGETS[seed % 2]})}
        )
        policy = Policy.load(base, settings)
        policy.update(make_rows(3, seed), version=0)
        policy.save_adapter(directory / "v1" / name)
        merged[name] = policy.save_weights(directory / f"merged-{name}")
    return merged


@pytest.mark.parametrize("prefix_bytes", [0, 2**26])
def test_rows_of_several_adapters_are_decoded_in_one_batch(
    base: Path, tmp_path: Path, prefix_bytes: int
) -> None:
    """Adapters of other ranks and layers, with the same prompts, which share no keys and values."""
    merged = make_versions(base, tmp_path, "abc")
    model = load_model(EngineOptions(tmp_path / "v1", max_context=256, max_slots=8))
    driver, prompt = Driver(model, prefix_bytes=prefix_bytes), list(range(40))
    for seed in range(3):
        samples = {
            name: driver.submit(prompt[: 40 - 39 * (seed == 1)], lora_path=name, max_new_tokens=30 + 9 * at)
            for at, name in enumerate(merged)
        }
        driver.finish([*samples.values()])
        assert driver.scheduler.counters.steps < 60 * (seed + 1), "they run at the same time"
        for name, whole in merged.items():
            plain = AutoModelForCausalLM.from_pretrained(whole)
            assert worst_error(plain, samples[name]) < TOLERANCE, name
    assert (driver.scheduler.counters.tokens_reused > 0) == (prefix_bytes > 0)


def test_a_request_whose_adapter_the_version_lacks_is_refused(base: Path, tmp_path: Path) -> None:
    merged = make_versions(base, tmp_path)
    model = load_model(EngineOptions(tmp_path / "v1", max_context=256, max_slots=8))
    driver = Driver(model)
    unknown = driver.submit([1, 2], lora_path="c", max_new_tokens=5)
    driver.finish([unknown])
    assert unknown.refused
    assert unknown.error == "lora_path = 'c': version 0 has no such adapter"
    kept, lost = (driver.submit([1, 2], lora_path=name, max_new_tokens=40) for name in "ab")
    driver.until(lambda: len(lost.output_ids) > 5)
    shutil.rmtree(tmp_path / "v1" / "b")
    driver.scheduler.load(model.read_weights(tmp_path / "v1"), "1", keep_cache=False, abort_all=False)
    driver.finish([kept, lost])
    assert lost.finish_reason == {"type": "abort", "message": "aborted"}, "no other adapter continues it"
    assert worst_error(AutoModelForCausalLM.from_pretrained(merged["b"]), lost) < TOLERANCE
    assert worst_error(AutoModelForCausalLM.from_pretrained(merged["a"]), kept) < TOLERANCE
    assert [version for version, _, _ in kept.spans] == ["0", "1"]


def test_adapters_of_different_base_models_are_refused(base: Path, policy: Policy, tmp_path: Path) -> None:
    make_versions(base, tmp_path, "a")
    other = Policy.load(make_model(tmp_path / "other", seed=1), SETTINGS)
    other.save_adapter(tmp_path / "v1" / "b")
    with pytest.raises(WeightsError, match="no common base model"):
        load_model(EngineOptions(base, max_context=256)).read_weights(tmp_path / "v1")


def test_a_base_model_that_was_replaced_is_refused(policy: Policy, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=1)
    adapter = policy.save_adapter(tmp_path / "v1")
    config = (adapter / "adapter_config.json").read_text()
    (adapter / "adapter_config.json").write_text(config.replace(str(policy._base), str(other)))
    model = load_model(EngineOptions(other, max_context=256))
    with pytest.raises(WeightsError, match=r"its base model .*other has the checksum"):
        model.read_weights(adapter)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, name: tensors.pop(name), "is not a matrix of a pair"),
        (lambda tensors, name: tensors.update({name: tensors[name][:, :3].contiguous()}), r"\[4, 3\]"),
        (
            lambda tensors, name: tensors.update({name.replace("q_proj", "x"): tensors.pop(name)}),
            "not a matrix",
        ),
    ],
)
def test_a_faulty_adapter_is_named_and_changes_nothing(
    policy: Policy, base: Path, tmp_path: Path, change: object, words: str
) -> None:
    adapter, merged = policy.save_adapter(tmp_path / "v1"), policy.save_weights(tmp_path / "merged")
    model = load_model(EngineOptions(adapter, max_context=256, max_slots=8))
    tensors = load_file(adapter / adapter_files.FILE)
    change(tensors, next(name for name in tensors if "q_proj.lora_A" in name))  # type: ignore[operator]
    save_file(tensors, adapter / adapter_files.FILE)
    with pytest.raises(WeightsError, match="are not those that were written"):
        model.read_weights(adapter)
    (adapter / checksum.FILE).unlink()
    with pytest.raises(WeightsError, match=words):
        model.read_weights(adapter)
    assert error_against(model, merged) < TOLERANCE


async def test_an_engine_that_loads_no_adapters_is_refused_by_name(
    stand: tuple[Engine, Publisher], policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would skip the names that it does not know, and serve the old weights as the new version."""
    engine, publisher = stand
    info = await engine.info()
    monkeypatch.delitem(info, "adapters")

    async def without() -> dict[str, object]:
        return info

    monkeypatch.setattr(engine, "info", without)
    with pytest.raises(PublishError, match=r'set trainer\.lora\.publish = "merged"'):
        await publisher.publish(1)
    assert engine.scheduler.version == "0"
    with pytest.raises(WeightsError, match="holds a LoRA adapter, and not a whole model"):
        weight_files(policy.save_adapter(tmp_path / "v1"))
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match="loads no LoRA adapters"):
            await EngineControl(publisher.engines()[0], http).load(tmp_path / "v1", 1)


@dataclass
class SGLang:
    """SGLang's routes of adapters, which answer as its version 0.5.23 does."""

    label: str = "v0"
    adapters: dict[str, str] = field(default_factory=lambda: {"v0": "", "another": ""})
    calls: list[str] = field(default_factory=list)
    enabled: bool = True
    fails: tuple[str, ...] = ()
    """Ends of the names of adapters that it cannot load."""

    async def handle(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json() if request.method == "POST" else {}
        self.calls.append(" ".join([request.path, *(str(body[key]) for key in list(body)[:1])]))
        if request.path == "/load_lora_adapter":
            if not self.enabled or body["lora_name"].endswith(self.fails):
                return web.json_response({"error_message": "LoRA is not enabled."}, status=400)
            assert body["lora_name"] not in self.adapters
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif request.path == "/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif request.path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.label = body["new_version"]
        return web.json_response(
            {"weight_version": self.label, "data": [{"id": "/base"}, *({"id": one} for one in self.adapters)]}
        )


@pytest.fixture
async def sglang(base: Path, policy: Policy, tmp_path: Path) -> AsyncIterator[tuple[SGLang, Publisher]]:
    server, app = SGLang(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)

    async def nothing(*_: object) -> None:
        return

    async def announce(url: str) -> None:
        server.calls.append("announced")

    async with served_app(app) as url:
        publisher = Publisher(
            writer=VersionWriter(directory=tmp_path / "weights", save_weights=policy.save_adapter),
            engines=lambda: [url],
            cancel_stale=nothing,
            quarantine=nothing,
            restore=nothing,
            announce=announce,
            current=(base, 0),
            retry_s=0.0,
        )
        yield server, publisher


async def test_sglang_loads_an_adapter_before_requests_name_it_and_drops_the_earlier_one_after(
    sglang: tuple[SGLang, Publisher], tmp_path: Path
) -> None:
    server, publisher = sglang
    await publisher.publish(1)
    assert server.calls == [
        "/model_info", "/v1/models", "/load_lora_adapter v1", "/update_weight_version v1", "/model_info",
        "announced", "/v1/models", "/unload_lora_adapter v0",
    ]  # fmt: skip
    assert server.adapters == {"another": "", "v1": str(publisher.current[0])}
    assert await labels_of(publisher.engines()) == {str(publisher.current[1])}
    server.label = "v0"  # a load whose label was not set is repeated
    assert await publisher.resync(publisher.engines()[0])
    assert server.label == "v1"


async def test_sglang_serves_no_adapter_that_another_run_left_under_the_same_name(
    sglang: tuple[SGLang, Publisher],
) -> None:
    server, publisher = sglang
    server.adapters["v1"] = "/of/another/run"
    await publisher.publish(1)
    assert server.adapters == {"another": "", "v1": str(publisher.current[0])}


async def test_a_damaged_adapter_and_a_server_without_lora_are_named(
    sglang: tuple[SGLang, Publisher], policy: Policy, tmp_path: Path
) -> None:
    server, publisher = sglang
    file = policy.save_adapter(tmp_path / "v2") / adapter_files.FILE
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match="are not those that were written"):
            await EngineControl(publisher.engines()[0], http).load(tmp_path / "v2", 2)
    server.enabled = False
    with pytest.raises(PublishError, match=r"LoRA is not enabled.* with --enable-lora"):
        await publisher.publish(3)
    assert (server.label, list(server.adapters)) == ("v0", ["v0", "another"])


async def test_sglang_serves_a_version_of_several_adapters_once_all_are_loaded(
    sglang: tuple[SGLang, Publisher], base: Path, tmp_path: Path
) -> None:
    server, publisher = sglang
    make_versions(base, tmp_path)
    publisher.serves = lambda url: "a"
    publisher.writer.save_weights = lambda place, dtype: shutil.copytree(
        tmp_path / "v1", place, dirs_exist_ok=True
    )
    publisher.current = (base, 1)
    await publisher.publish_start()
    loaded = [call for call in server.calls if call.startswith("/load")]
    assert sorted(loaded) == ["/load_lora_adapter v1-a", "/load_lora_adapter v1-b"]
    assert server.calls[-6:] == [
        loaded[-1], "/update_weight_version v1-", "/model_info", "announced", "/v1/models",
        "/unload_lora_adapter v0",
    ]  # fmt: skip
    assert server.adapters == {
        "another": "", **{f"v1-{name}": str(publisher.current[0] / name) for name in "ab"}
    }  # fmt: skip
    assert await labels_of(publisher.engines()) == {str(publisher.current[1])}
    for fails in ("2-a", "2-b"):  # one of the two is loaded, whichever is the first
        server.fails = (fails,)
        with pytest.raises(PublishError, match="LoRA is not enabled"):
            await publisher.publish(2)
        assert server.label == "v1-", "requests name the version that is there as a whole"
        assert {"v1-a", "v1-b"} < server.adapters.keys()
    server.fails = ()
    await publisher.publish(3)
    assert server.label == "v3-"
    assert server.adapters.keys() == {"another", "v3-a", "v3-b"}, "also of the version that failed"


async def test_sglang_keeps_adapters_that_only_look_like_those_of_policies(
    sglang: tuple[SGLang, Publisher],
) -> None:
    server, publisher = sglang
    server.adapters["v0-mine"] = ""
    await publisher.publish(1)
    assert server.adapters.keys() == {"another", "v0-mine", "v1"}


def test_the_best_checkpoint_is_a_whole_model(policy: Policy, base: Path, tmp_path: Path) -> None:
    adapter, merged = policy.save_adapter(tmp_path / "v1"), policy.save_weights(tmp_path / "merged")
    BestCheckpoint.open(tmp_path / "run").update_if_better(adapter, 1, 1, 0.5)
    best = load_model(EngineOptions(tmp_path / "run" / "checkpoints" / "best", max_context=256, max_slots=8))
    assert error_against(best, merged) < TOLERANCE
    assert (tmp_path / "run" / "checkpoints" / "best" / "tokenizer.json").exists()


def test_a_base_model_that_was_replaced_under_an_engine_is_read_again(base: Path, tmp_path: Path) -> None:
    place = tmp_path / "base"
    shutil.copytree(base, place)
    model = load_model(EngineOptions(place, max_context=256, max_slots=8))
    other = Policy.load(base, TrainerSettings(learning_rate=0.1))
    other.update(make_rows(3, 0), version=0)
    other.save_weights(place)  # with files of the same names
    policy = Policy.load(place, SETTINGS)
    policy.update(make_rows(3, 0), version=0)
    adapter, merged = policy.save_adapter(tmp_path / "v1"), policy.save_weights(tmp_path / "merged")
    model.copy_weights(model.read_weights(adapter))
    assert error_against(model, merged) < TOLERANCE
