"""The sections `[policies.NAME]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidegate.config import Settings, load_settings, saved
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import Reward
from tidegate.errors import ConfigError
from tidegate.trainer.preflight import check_rewarded_policies
from tidegate.trainer.processes.servers import engine_names

TEXT = """
[model]
path = "base"

[policies.solver]
learning_rate = 1e-3
loss = {name = "gspo"}

[policies.verifier]
path = "other"
engine = {max_slots = 8}

[policies.rival]
earlier = "solver"
behind = 3
"""


def test_a_policy_has_the_runs_settings_but_for_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(TEXT)
    settings = load_settings(file, ["--policies.verifier.learning_rate", "2e-3"])
    solver, verifier, rival = (settings.of_policy(name) for name in settings.policies)
    assert (solver.trainer.learning_rate, verifier.trainer.learning_rate) == (1e-3, 2e-3)
    assert (solver.trainer.loss.name, verifier.trainer.loss.name) == ("gspo", "dppo")
    assert [str(one.model.path) for one in (solver, verifier, rival)] == ["base", "other", "base"]
    assert (solver.engine.max_slots, verifier.engine.max_slots) == (64, 8)
    assert settings.trained_policies == ["solver", "verifier"]
    file.write_text(saved(settings))
    assert load_settings(file) == settings


def test_a_run_with_one_policy_writes_no_section_of_policies() -> None:
    assert "policies" not in saved(settings_of({}))


def settings_of(policies: dict[str, Any], **sections: Any) -> Settings:
    return Settings.model_validate({"model": {"path": "base"}, "policies": policies, **sections})


def test_policies_share_engines_if_adapters_of_one_base_are_published() -> None:
    adapter = {"lora": {"rank": 4, "publish": "adapter"}}
    others = {"c": {**adapter, "path": "other"}, "d": {**adapter, "engine": {}}, "e": {"lora": {"rank": 4}}}
    settings = settings_of({"a": adapter, "b": adapter, **others})
    assert settings.engine_sets == {"a": ["a", "b"], "c": ["c"], "d": ["d"], "e": ["e"]}
    assert settings_of({}).engine_sets == {"": [""]}
    kinds = {"fixed": {"train": False, **adapter}, "a": adapter, "old": {"earlier": "a"}}
    for kind, sets in (
        ("sglang", {"fixed": ["fixed", "a", "old"]}),
        ("vllm", {"fixed": ["fixed"], "a": ["a", "old"]}),  # which may mix rows without and with an adapter
    ):
        assert settings_of(kinds, engine={"kind": kind, "python": "p"}).engine_sets == sets


@pytest.mark.parametrize(
    ("policies", "sections", "message"),
    [
        ({"a b": {}}, {}, "is no name of a policy"),
        ({"a": {"train": False}}, {}, "none is trained"),
        ({"a": {}, "b": {"earlier": "c"}}, {}, "no trained policy; these are: a"),
        ({"a": {}, "b": {"earlier": "a"}, "c": {"earlier": "b"}}, {}, "earlier = 'b' is no trained policy"),
        ({"a": {"earlier": "b"}, "b": {"earlier": "a"}, "c": {}}, {}, "no trained policy; these are: c"),
        ({"a": {}, "b": {"earlier": "a", "path": "x"}}, {}, "path has no effect with earlier"),
        ({"a": {}, "b": {"behind": 2}}, {}, "behind has no effect without earlier"),
        (
            {"a": {"lora": {"rank": 600, "publish": "adapter"}}},
            {"engine": {"kind": "vllm", "python": "p"}},
            "vLLM serves adapters of at most rank 512",
        ),
        ({"a": {}, "b": {"train": False, "learning_rate": 1}}, {}, "learning_rate has no effect"),
        ({"a": {}}, {"trainer": {"ranks": 2}}, "trainer.ranks = 2 is not supported with policies"),
        ({"a": {}}, {"trainer": {"baseline": "key"}}, 'use "group" or "batch"'),
        ({"a": {}}, {"engine": {"device": "cuda"}}, "policies.NAME.engine.device"),
        (
            {"a": {"engine": {"kind": "sglang", "python": "x", "pause": "in_place"}}},
            {},
            r"policies\.a\.engine\.pause must be",
        ),
        ({"a": {"lora": {"alpha": 1}}}, {}, "no effect without LoRA"),
        ({"a": {"engine": {"urls": ["http://e:1"]}}}, {}, "policies.a.engine.urls is not supported"),
    ],
)
def test_contradictions_are_refused(policies: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(policies, **sections)


def test_a_setting_of_a_policy_that_does_not_exist_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(TEXT)
    with pytest.raises(ConfigError, match=r"policies\.solver\.learningrate"):
        load_settings(file, ["--policies.solver.learningrate", "1"])


class Judged(Arithmetic):
    rewards = (Reward("right", lambda output: 1.0, policy="critic"),)


def test_a_reward_of_a_policy_that_the_run_does_not_have_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="'critic', and the run has solver"):
        check_rewarded_policies(settings_of({"solver": {}}), Judged())
    with pytest.raises(ConfigError, match="one without a name"):
        check_rewarded_policies(settings_of({}), Judged())
    check_rewarded_policies(settings_of({"critic": {}}), Judged())


def test_engines_of_different_policies_have_different_names() -> None:
    settings = settings_of({"a": {"engine": {"count": 2}}, "a-1": {}})
    names = [
        name for policy in settings.policies for name in engine_names(settings.of_policy(policy), policy)
    ]
    assert len(names) == len(set(names)) == 3
