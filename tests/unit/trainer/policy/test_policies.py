"""Several trained policies as one: their rows, steps, published versions and states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.trainer.learning_fixtures import make_model, make_rows
from tidegate.config import Settings
from tidegate.errors import CheckpointError, TrainingError
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.policies import Policies, load_policies
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.publish.layout import engine_weights, is_fixed, published
from tidegate.weights.adapter_files import FILE
from tidegate.weights.files import is_adapter, weight_files


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


def settings_of(base: Path, policies: dict[str, Any], **trainer: Any) -> Settings:
    trainer = {"learning_rate": 1e-2, **trainer}
    return Settings.model_validate({"model": {"path": base}, "policies": policies, "trainer": trainer})


def load(base: Path, policies: dict[str, Any], **trainer: Any) -> Policies:
    return load_policies(settings_of(base, policies, **trainer), base)


def of(policy: str, rows: list[TrainingSequence]) -> list[TrainingSequence]:
    return [replace(row, policy=policy) for row in rows]


def parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.model.named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def test_each_of_two_equal_policies_takes_the_single_policys_step(base: Path) -> None:
    rows = make_rows(6)
    single = Policy.load(base, settings_of(base, {}).trainer)
    single.update(rows, 4)
    both = load(base, {"a": {}, "b": {}})
    metrics = both.update([*of("a", rows), *of("b", rows)], 4)
    for name in ("a", "b"):
        assert largest_difference(parameters(both.trained[name]), parameters(single)) <= 1e-6
    assert metrics["policy/a/loss"] == metrics["policy/b/loss"] == metrics["loss"]
    assert metrics["tokens/trained"] == 2 * metrics["policy/a/tokens/trained"]


def test_a_policy_without_a_row_keeps_its_weights_and_settings_are_its_own(base: Path) -> None:
    both = load(base, {"a": {"learning_rate": 1e-3}, "b": {}})
    before = parameters(both.trained["b"])
    metrics = both.update(of("a", make_rows(3)), 4)
    assert metrics["policy/a/learning_rate"] == 1e-3
    assert "policy/b/loss" not in metrics
    assert largest_difference(parameters(both.trained["b"]), before) == 0


def test_a_step_that_one_policy_cannot_take_is_skipped_by_all(base: Path) -> None:
    both = load(base, {"a": {}, "b": {}})
    before = {name: parameters(policy) for name, policy in both.trained.items()}
    bad = of("b", make_rows(2, seed=1))
    bad[1].advantages[:] = np.nan
    metrics = both.update([*of("a", make_rows(6)), *bad], 4)
    assert metrics["skipped"] == 1
    assert both.non_finite == [bad[1].group_id]
    assert both.untrained == ["g0", "g1", "g2"]
    for name, policy in both.trained.items():
        assert largest_difference(parameters(policy), before[name]) == 0
    assert both.update([*of("a", make_rows(3)), *of("b", make_rows(3))], 4)["skipped"] == 0


def test_a_row_of_another_policy_is_refused(base: Path) -> None:
    with pytest.raises(TrainingError, match="'c', and the run trains a, b"):
        load(base, {"a": {}, "b": {}}).backward(of("c", make_rows(1)), 4)
    with pytest.raises(TrainingError, match="no trainable token"):
        load(base, {"a": {}, "b": {}}).optimizer_step()


def test_a_resumed_run_takes_the_step_of_the_run_before(base: Path, tmp_path: Path) -> None:
    kinds = {"a": {}, "b": {"lora": {"rank": 2}}}
    run, resumed = load(base, kinds), load(base, kinds)
    run.update([*of("a", make_rows(3)), *of("b", make_rows(3, seed=1))], 4)
    run.save_weights(tmp_path)
    run.save_state(tmp_path / "trainer.pt")
    resumed = load_policies(resumed.settings, tmp_path)
    resumed.load_state_from(tmp_path / "trainer.pt")
    resumed.load_weights(tmp_path)
    for policies in (run, resumed):
        policies.update([*of("a", make_rows(3, seed=2)), *of("b", make_rows(3, seed=3))], 4)
    for name in kinds:
        own, before = parameters(resumed.trained[name]), parameters(run.trained[name])
        assert largest_difference(own, before) == 0
    other = load(base, {"a": {}, "c": {}})
    with pytest.raises(CheckpointError, match=r"c/trainer\.pt is not a trainer state"):
        other.load_state_from(tmp_path / "trainer.pt")


def test_a_version_has_the_weights_of_each_policy_and_of_earlier_selves(base: Path, tmp_path: Path) -> None:
    kinds = {"a": {}, "b": {}, "old": {"earlier": "a", "behind": 2}, "fixed": {"train": False}}
    policies = load(base, kinds)
    settings = policies.settings
    for version in range(4):
        directory = policies.save_adapter(tmp_path / f"v{version:06d}")
        # Before there is such a version, an earlier self is its base model.
        old = engine_weights(settings, directory, "old")
        assert old == (base if version < 2 else directory / "old")
        if version >= 2:
            before = published(settings, tmp_path / f"v{version - 2:06d}", "a") / "model.safetensors"
            assert (old / "model.safetensors").samefile(before)
        assert engine_weights(settings, directory, "fixed") == base
        assert (directory / "b" / "model.safetensors").is_file()
        policies.update(of("a", make_rows(3)), 4)


def test_policies_of_one_base_share_engines_by_their_adapters(base: Path, tmp_path: Path) -> None:
    adapter = {"lora": {"rank": 2, "publish": "adapter"}}
    policies = load(base, {"a": adapter, "b": adapter, "c": {}, "d": {**adapter, "engine": {}}})
    assert policies.settings.engine_sets == {"a": ["a", "b"], "c": ["c"], "d": ["d"]}
    directory = policies.save_adapter(tmp_path / "v000000")
    shared = engine_weights(policies.settings, directory, "a")
    assert is_adapter(shared)
    assert sorted(path.name for path in shared.iterdir()) == ["a", "b"]
    assert not is_adapter(engine_weights(policies.settings, directory, "c"))
    # A checkpoint has merged models, which no engine may have as the base of an adapter.
    policies.save_weights(tmp_path / "step_1")
    for name in ("a", "d"):
        assert engine_weights(policies.settings, tmp_path / "step_1", name) == base


def test_earlier_selves_and_frozen_policies_share_engines(base: Path, tmp_path: Path) -> None:
    kinds = {"fixed": {"train": False}, "a": {}, "old": {"earlier": "a", "behind": 2}}
    policies = load(base, kinds, lora={"rank": 2, "publish": "adapter"})
    settings = policies.settings
    assert settings.engine_sets == {"fixed": ["fixed", "a", "old"]}
    assert not is_fixed(settings, "fixed")
    files = []
    for version in range(4):
        shared = engine_weights(settings, policies.save_adapter(tmp_path / f"v{version:06d}"), "fixed")
        # An engine refuses calls of an adapter that it does not have, so there is one from the start.
        assert sorted(path.name for path in shared.iterdir()) == ["a", "old"]
        files.append({name: (shared / name / FILE).read_bytes() for name in ("a", "old")})
        policies.update(of("a", make_rows(3)), 4)
    assert [one["old"] for one in files] == [files[at]["a"] for at in (0, 0, 0, 1)]


def test_a_policy_that_is_frozen_at_a_resume_has_its_own_models_weights(base: Path, tmp_path: Path) -> None:
    load(base, {"a": {}, "b": {}}).save_weights(tmp_path / "step_1")
    settings = settings_of(base, {"a": {}, "b": {"train": False}})
    assert engine_weights(settings, tmp_path / "step_1", "b") == base
    assert [name for name in settings.engine_sets if is_fixed(settings, name)] == ["b"]


def test_a_model_with_adapters_in_subdirectories_is_a_whole_model(tmp_path: Path) -> None:
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech" / "adapter_config.json").write_text("{}")
    assert is_adapter(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
