"""Settings: reading, overrides, errors with names, and writing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests import REPO
from tidegate.cli import main
from tidegate.config import EngineSettings, Settings, load_settings, saved
from tidegate.errors import ConfigError
from tidegate.settings.losses import GSPOLoss
from tidegate.settings.reading import arguments_of, load, overlay, split_words
from tidegate.settings.sections import differences, dump, known_keys
from tidegate.settings.servers import GatewayCommand, VLLMCommand
from tidegate.trainer.processes.servers import gateway_arguments, judge_secrets
from tidegate.types import Sampling

MODEL = ["--model.path", "somewhere"]
SGLANG = ["--engine.kind=sglang", "--engine.urls=http://x:1"]
ADAPTER = [*MODEL, "--trainer.lora.rank", "4", "--trainer.lora.publish", "adapter"]
EVALUATED = [*MODEL, "--trainer.promotion.mode=evaluated", "--engine.count=2"]
JUDGE = ["--env.judge.url=http://j:1/v1", "--env.judge.model=m", "--env.judge.rubric=be right"]
CLIENT = [*MODEL, "--agent.source=client", "--gateway.keys=keys.json"]


def test_defaults_overrides_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[model]\npath = "m"\n[trainer]\nsteps = 7\n[env.options]\nlevel = 3\n')
    settings = load_settings(
        path, ["--trainer.max_staleness=none", "--run.name", "x y", "--engine.urls", '["http://a"]']
    )
    assert settings.trainer.steps == 7
    assert settings.trainer.staleness_bound is None
    assert settings.run.name == "x y"
    assert settings.engine.urls == ["http://a"]
    assert settings.env.options == {"level": 3}
    again = tmp_path / "b.toml"
    again.write_text(dump(settings))
    assert load_settings(again) == settings


@pytest.mark.parametrize(
    "overrides",
    [["--trainer.baseline=batch", "--trainer.group_size=1"], ["--trainer.on_policy=true"], [*CLIENT[2:]]],
)
def test_the_settings_that_a_run_saves_can_be_read_again(tmp_path: Path, overrides: list[str]) -> None:
    """Every default is written, and must not contradict what was set."""
    file, settings = tmp_path / "config.toml", load_settings(None, [*MODEL, *overrides])
    file.write_text(dump(settings))
    assert load_settings(file) == settings


def test_on_policy_is_what_makes_it_synchronous_and_contradicts_nothing() -> None:
    on_policy = [*MODEL, "--trainer.on_policy", "true"]
    settings = load_settings(None, on_policy)
    assert (settings.trainer.staleness_bound, settings.trainer.publish_interval) == (0, 1)
    assert load_settings(None, [*on_policy, "--trainer.max_staleness=0"]) == settings
    for other, value in (("max_staleness", "4"), ("max_staleness", "'none'"), ("publish_interval", "3")):
        with pytest.raises(ConfigError, match=rf"trainer\.{other} = {value} is set: remove one of the two"):
            load_settings(None, [*on_policy, f"--trainer.{other}={value}"])


@pytest.mark.parametrize("text", ["7", "1.10", "2026-11-22", "true", "[1]", "nan"])
def test_a_text_is_read_from_the_command_line_as_it_stands(text: str) -> None:
    settings = load_settings(
        None, [*MODEL, "--run.name", text, f"--gateway.admin_key={text}", "--run.dir", text]
    )
    assert settings.run.name == settings.gateway.admin_key == str(settings.run.dir) == text
    assert load_settings(None, [*MODEL, f'--run.name="{text}"']).run.name == text


def test_a_number_for_a_text_in_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[run]\nname = 7\n[model]\npath = "m"\n')
    with pytest.raises(ConfigError, match=r"run\.name = 7: must be text; write it in quotes"):
        load_settings(file)


def test_the_context_of_embedded_engines_bounds_no_others() -> None:
    long = [*MODEL, "--sampling.max_tokens=4096"]
    for others in (['--engine.urls=["http://e:1"]'], ["--engine.kind=sglang", "--engine.python=p"]):
        assert load_settings(None, [*long, *others]).engine.context is None


DECOUPLED = ["--trainer.loss.name", "decoupled_ppo", "--trainer.minibatches", "2"]
STREAMING = ["--trainer.minibatches", "3", "--trainer.streaming", "true"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*MODEL, "--trainer.lerning_rate", "1"], "did you mean 'trainer.learning_rate'?"),
        (
            [*MODEL, "--group_size", "4"],
            "there is no setting 'group_size'; did you mean 'trainer.group_size'?",
        ),
        ([*MODEL, "--trainer.lr", "1e-5"], "did you mean 'trainer.learning_rate'?"),
        ([*MODEL, "--sampling.max_new_tokens", "9"], "did you mean 'sampling.max_tokens'?"),
        ([*MODEL, "--trainer.num_generations", "8"], "did you mean 'trainer.group_size'?"),
        ([*MODEL, "--data", "x.jsonl"], "there is no setting 'data'; did you mean 'env.options'?"),
        ([*MODEL, "--trainer.steps", "many"], "trainer.steps = 'many'"),
        ([*MODEL, "--trainer.steps", "0"], "trainer.steps = 0"),
        (
            [*MODEL, "--trainer.learning_rate=inf"],
            "trainer.learning_rate = inf: input should be a finite number",
        ),
        ([*MODEL, "--trainer.max_staleness", "-1"], "a number of versions ≥ 0, or 'none'"),
        ([*MODEL, "--trainer.steps"], "--trainer.steps needs a value"),
        ([*MODEL, "steps=3"], "'steps=3' is not a setting"),
        ([*MODEL, "--trainer.steps.more", "3"], "trainer.steps"),
        ([*MODEL, "--sampling.max_tokens", "2000"], "leaves no room for a prompt"),
        ([*MODEL, "--gateway.host", "0.0.0.0"], "set gateway.admin_key"),
        ([*MODEL, "--agent.source=remote", "--agent.use=a.py:b"], "agent.use has no effect"),
        ([*MODEL, "--agent.source=remote", "--agent.workers=2"], "agent.workers has no effect"),
        ([*MODEL, "--agent.heartbeat_s=2"], "agent.heartbeat_s has no effect"),
        ([*MODEL, "--agent.source=client"], "needs gateway.keys, the file with the keys of its clients"),
        ([*MODEL, "--gateway.keys=k"], 'has no effect with "local"'),
        (
            [*CLIENT, "--agent.use=a.py:b"],
            'agent.use has no effect with agent.source = "client": clients run',
        ),
        ([*MODEL, "--gateway.url=http://g:1", "--gateway.port=2"], "gateway.port has no effect with gateway"),
        ([*CLIENT, "--gateway.url=http://g:1"], "gateway.keys has no effect with gateway.url"),
        ([*MODEL, "--gateway.url=g"], "gateway.url = 'g': not a URL"),
        ([*CLIENT, "--agent.max_concurrency=2"], "agent.max_concurrency has no effect"),
        ([*CLIENT, "--env.use=gsm8k"], "env.use has no effect"),
        ([*CLIENT, "--eval.every=5"], "eval.every has no effect"),
        ([*CLIENT, *JUDGE, "--env.judge.kind=ranking"], "a conversation is a group of its own"),
        ([*MODEL, *JUDGE, "--gateway.url=http://g:1"], "env.judge has no effect with gateway.url"),
        ([*MODEL, *JUDGE, "--env.urls=http://e:1"], "env.judge has no effect with env.urls"),
        ([*MODEL, "--env.judge.weight=2"], "env.judge.weight has no effect without env.judge.url"),
        ([*MODEL, *JUDGE, "--env.judge.rubrik=r"], "did you mean 'env.judge.rubric'"),
        ([*CLIENT, "--gateway.shards=2"], "needs gateway.shards = 1, not 2"),
        ([*CLIENT, "--trainer.gate_timeout_s=5"], "gate_timeout_s has no effect without max_stale_share"),
        (
            [*CLIENT, "--trainer.max_stale_share=0.1", "--trainer.max_staleness=none"],
            'max_stale_share has no effect with max_staleness = "none"',
        ),
        ([*MODEL, "--gateway.public_url", "me:8000"], "gateway.public_url = 'me:8000': not a URL"),
        ([*MODEL, '--engine.urls=["localhost:30000"]'], "engine.urls.0 = 'localhost:30000': not a URL"),
        ([*MODEL, '--engine.urls=["http://e:99999"]'], "not a URL: Port out of range"),
        ([*MODEL, "--run.name", "../x"], "run.name = '../x': must be the name of a directory in run.dir"),
        ([*MODEL, "--run.name", ""], "run.name = ''"),
        ([*MODEL, "--run.name", ".."], "run.name = '..'"),
        (
            [*MODEL, "--trainer.loss.name", "gsop"],
            "trainer.loss: there is no loss 'gsop'; did you mean 'gspo'?",
        ),
        ([*MODEL, "--trainer.loss", "truncated"], 'write [trainer.loss] with name = "truncated_is"'),
        (
            [*MODEL, "--trainer.loss.name", "grpo", "--trainer.loss.importance_cap", "3"],
            "trainer.loss: importance_cap does not apply to name = 'grpo', only to truncated_is, masked_is, ",
        ),
        (
            [*MODEL, "--trainer.loss.name", "gspo", "--trainer.loss.sequence_mask", "0.1"],
            "sequence_mask does not apply to name = 'gspo', only to grpo, dr_grpo, dapo",
        ),
        (
            [*MODEL, "--trainer.loss.name", "grpo", "--trainer.loss.dual_clip", "3"],
            "dual_clip does not apply to name = 'grpo', only to dapo",
        ),
        ([*MODEL, "--trainer.loss.name", "dapo", "--trainer.loss.dual_clip", "1"], "dual_clip = 1: "),
        (
            [*MODEL, "--trainer.loss.name", "gspo", "--trainer.loss.score_centering", "32"],
            "score_centering does not apply to name = 'gspo', only to truncated_is, masked_is, cispo, grpo, "
            "dr_grpo, dapo, dppo",
        ),
        ([*MODEL, "--trainer.loss.score_centering", "2000"], "score_centering = 2000: "),
        ([*MODEL, "--sampling.temperature", "1e-7"], "sampling.temperature = 1e-07: "),
        (
            [
                *MODEL,
                "--trainer.loss.name=masked_is",
                "--trainer.loss.level=sequence",
                "--trainer.loss.score_centering=8",
            ],
            'score_centering = 8 needs level = "token"',
        ),
        ([*MODEL, "--trainer.loss.clip_hihg", "3"], "did you mean 'trainer.loss.clip_high'?"),
        (
            [*MODEL, "--trainer.loss.name", "masked_is", "--trainer.loss.importance_cap", "-1"],
            "trainer.loss.importance_cap = -1: ",
        ),
        ([*MODEL, "--trainer.lora.alpha", "8"], "alpha has no effect without LoRA: set trainer.lora.rank"),
        ([*MODEL, "--trainer.lora.publish", "adapter"], "publish has no effect without LoRA"),
        (
            [*ADAPTER, "--trainer.publish_transport", "broadcast"],
            'trainer.lora.publish = "adapter" needs trainer.publish_transport = "files"',
        ),
        (
            [*ADAPTER, *SGLANG, "--engine.pause=in_place"],
            'engine.pause = "in_place" has no effect with trainer.lora.publish = "adapter"',
        ),
        (
            [*ADAPTER, "--engine.kind=vllm", "--engine.python=p", "--trainer.lora.rank=513"],
            "trainer.lora.rank = 513: vLLM serves adapters of at most rank 512",
        ),
        (
            [*ADAPTER, *SGLANG, '--trainer.lora.targets=["self_attn.q_proj", "down_proj"]'],
            "only with v_proj, too",
        ),
        ([*ADAPTER, *SGLANG, '--trainer.lora.targets=["k_proj"]'], "only with q_proj and v_proj, too"),
        ([*ADAPTER, *SGLANG, '--trainer.lora.targets=["up_proj"]'], "only with gate_proj, too"),
        (
            [*ADAPTER, "--engine.kind=sglang", "--engine.python=p", *EVALUATED[len(MODEL) :]],
            'does not go with trainer.promotion.mode = "evaluated" and engine.kind = "sglang"',
        ),
        (
            [
                *MODEL,
                "--trainer.loss.name=decoupled_ppo",
                "--trainer.minibatches=2",
                "--trainer.ess_scaling=true",
            ],
            "ess_scaling needs the effective sample size of the whole batch",
        ),
        ([*MODEL, "--trainer.until", "0.9", "--eval.every", "0"], "trainer.until needs evaluations"),
        (
            [*MODEL, "--agent.source", "client", "--gateway.keys", "k", "--trainer.until", "0.9"],
            'trainer.until has no effect with agent.source = "client"',
        ),
        ([*MODEL, "--trainer.kl_estimator", "k1"], "kl_estimator has no effect without a penalty"),
        (
            [
                *MODEL,
                "--engine.kind=sglang",
                "--engine.python=p",
                "--engine.dtype=float32",
                "--engine.arguments=--dtype",
                "--engine.arguments=half",
            ],
            'engine.dtype = "float32" and --dtype half in engine.arguments are one setting',
        ),
        (
            [*MODEL, "--engine.kind", "sglang", "--engine.python", "p", "--engine.max_slots", "8"],
            'engine.max_slots is for engine.kind = "embedded"',
        ),
        ([*MODEL, "--trainer.minibatches", "2"], "set trainer.loss.name = 'decoupled_ppo'"),
        ([*MODEL, *DECOUPLED, "--trainer.on_policy", "true"], "set minibatches to 1"),
        ([*MODEL, *DECOUPLED, "--trainer.groups_per_batch", "1"], "groups are not split"),
        ([*MODEL, "--trainer.streaming", "true"], "set trainer.minibatches to 2 or more"),
        ([*MODEL, *DECOUPLED, "--trainer.streaming", "true"], "groups_per_batch = 8, publish_interval = 2"),
        (
            [*MODEL, *STREAMING, "--trainer.advantage_scale", "batch"],
            "streaming trains on minibatches as they become ready",
        ),
        (
            [*MODEL, *STREAMING, "--trainer.baseline", "batch"],
            "baseline = 'batch' needs all rewards of a batch at once",
        ),
        ([*MODEL, "--trainer.group_size", "1"], "nothing to compare a single episode of a group with"),
        (
            [*MODEL, "--trainer.baseline", "batch", "--trainer.advantage_scale", "group"],
            "advantage_scale = 'group' contradicts baseline = 'batch'",
        ),
        (
            [*MODEL, "--trainer.baseline", "batch", "--trainer.dynamic_sampling", "true"],
            "dynamic_sampling has no effect with baseline = 'batch'",
        ),
        ([*MODEL, "--trainer.promotion.share=0.5"], 'share is for mode = "canary"'),
        ([*MODEL, "--trainer.promotion.margin=0.5"], 'margin has no effect with mode = "always"'),
        ([*MODEL, "--trainer.promotion.mode=canary"], 'needs agent.source = "client", not "local"'),
        ([*CLIENT, "--trainer.promotion.mode=evaluated"], 'needs agent.source = "local" or "remote"'),
        ([*MODEL, "--trainer.promotion.mode=evaluated"], "there are 1: raise engine.count"),
        ([*EVALUATED, "--gateway.shards=2"], "needs gateway.shards = 1, not 2"),
        ([*EVALUATED, "--trainer.publish_interval=never"], "has no effect with trainer.publish_interval"),
        ([*MODEL, "--trainer.length_penalty", "[40, 20]"], "it must be two increasing numbers"),
        ([*MODEL, "--trainer.kl_coef", "0.1"], "kl_coef needs trainer.reference_model"),
        ([], "the setting 'model.path' is required"),
        ([*MODEL, f"--trainer.steps=1{23 * '0'}"], f"steps = 1{23 * '0'}: must not exceed 1,000,000,000,000"),
        ([*MODEL, "--trainer.steps=1e23"], "trainer.steps = 1e+23: must not exceed 1,000,000,000,000"),
        ([*MODEL, f"--trainer.max_staleness=1{20 * '0'}"], "00: must not exceed 1,000,000,000,000"),
        ([*MODEL, "--trainer.learning_rate=1e300"], "trainer.learning_rate = 1e+300: must not exceed"),
        ([*MODEL, "--engine.count=1000000000"], "engine.count = 1000000000: input should be less than or"),
        ([*MODEL, f"--run.seed=1{19 * '0'}"], "00: must not exceed 9,223,372,036,854,775,807"),
        ([*MODEL, "--trainer.seed=1"], "there is no setting 'trainer.seed'; did you mean 'run.seed'?"),
    ],
)
def test_what_is_wrong_is_refused_by_name(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, overrides)
    assert words in str(caught.value)


def test_a_batch_is_selected_whole_or_in_streamed_minibatches() -> None:
    assert load_settings(None, MODEL).trainer.part_sizes == [16]
    assert load_settings(None, [*MODEL, *DECOUPLED]).trainer.part_sizes == [16]
    streaming = load_settings(None, [*MODEL, *STREAMING, "--trainer.on_policy", "true"]).trainer
    assert (streaming.part_sizes, streaming.staleness_bound) == ([5, 5, 6], 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = [", "not valid TOML"),
        (None, "no such settings file"),
        ("\xff", "not valid UTF-8: byte 0xff at position 0; save it as UTF-8"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words) as caught:
        load_settings(path)
    assert "c.toml" in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\r\npath = 'm'\r\n")
    assert load_settings(path).model.path == Path("m")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--trainr.lr=1", "^the command line: there is no setting 'trainr'"),
        ("--trainer.group_size=1", r"c\.toml with the command line: baseline = 'group'"),
        (
            "--agent.options={command = [node]}",
            r"^the command line: agent.options = .*: must be a table, as ",
        ),
        ("--engine.urls=localhost:3000", r"^the command line: engine.urls.0 = 'localhost:3000': not a URL"),
    ],
)
def test_a_mistake_on_the_command_line_is_not_charged_to_the_file(
    tmp_path: Path, override: str, words: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "m"\n')
    with pytest.raises(ConfigError, match=words):
        load_settings(path, [override])


def test_a_list_on_the_command_line_is_toml_or_its_elements() -> None:
    for words in (
        ['--engine.urls=["http://a", "http://b"]'],
        ["--engine.urls=http://a", "--engine.urls=http://b"],
    ):
        assert load_settings(None, [*MODEL, *words]).engine.urls == ["http://a", "http://b"]
    assert load_settings(None, [*MODEL, "--gateway.untrained_models", "7"]).gateway.untrained_models == ["7"]


def test_another_class_on_the_command_line_leaves_out_the_options_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "m"\n[env]\nuse = "gsm8k"\noptions = {path = "p"}\n')
    assert load_settings(path, ["--env.use=gsm8k"]).env.options == {"path": "p"}
    assert load_settings(path, ["--env.options.mode=m", "--env.use=dataset"]).env.options == {"mode": "m"}


@pytest.mark.parametrize("text", ["http://a", "7", '"x"', "[1]", "it's", "--dtype", "true"])
def test_settings_are_read_again_from_the_arguments_that_they_make(text: str) -> None:
    settings = VLLMCommand.model_validate(
        {"model": {"path": text}, "engine": {"python": text, "arguments": [text, "--more"]}}
    )
    assert load(VLLMCommand, None, arguments_of(settings)) == settings


def test_policies_survive_the_command_line_and_are_refused_by_name() -> None:
    words = ["--model.path=x", "--policies.solver.path=7", "--policies.the_2nd-one.path", "y"]
    more = ["--policies.the_2nd-one.train=false", "--policies.solver.tool_parser", "mistral"]
    settings = load(GatewayCommand, None, [*words, *more])
    assert {name: str(own.path) for name, own in settings.policies.items()} == {
        "solver": "7",
        "the_2nd-one": "y",
    }
    assert (settings.policies["solver"].train, settings.policies["the_2nd-one"].train) == (True, False)
    assert load(GatewayCommand, None, arguments_of(settings)) == settings
    for wrong, why in {
        "--policies.policy.path=z": "'policy' is no name for one of several policies",
        "--policies.a b.path=z": "'a b' is no name of a policy",
        "--policies.solver.weights=z": "there is no setting 'policies.solver.weights'",
        "--policies.solver.tool_parser=z": "policies.solver.tool_parser = 'z'",
        "--policies.solver.train=false": "policies.solver.path",
        "--policies.solver=z": "policies.solver",
        "--policies.a.engines=critic": "policies.a.engines = 'critic' is not the name of a policy",
        "--gateway.untrained_models=title": "untrained_models has 'title', which is no policy",
        "--engine.urls=http://h:1": "engine.urls does not say which policy",
    }.items():
        named = ["--policies.a.path=z"] if "solver" not in wrong else []
        with pytest.raises(ConfigError, match=re.escape(why)):
            load(GatewayCommand, None, ["--model.path=x", *named, wrong])


def test_a_gateways_settings_survive_its_command_line() -> None:
    gateway = {
        "reward_range": [-1, 1], "redact": "privacy.py:redact", "conversation_rewards": ["a.py:b", "7:c"],
        "untrained_models": ["titles", "7", "a b"],
        "public_url": "https://host:1", "conversation_idle_s": 2.5,
    }  # fmt: skip
    settings = GatewayCommand.model_validate({"model": {"path": "x"}, "gateway": gateway})
    assert load(GatewayCommand, None, arguments_of(settings)) == settings


FLAT = """
[run]
name = "demo"
[model]
path = "m"
[trainer]
loss = "truncated"
importance_cap = 2.0
lora_rank = 0
"""
"""Settings without the sections that they belong to."""


def test_settings_outside_their_section_are_refused_with_the_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(FLAT)
    assert main(["train", str(file), "--resume"]) == ConfigError.exit_code
    assert capsys.readouterr().err.splitlines() == [
        f"tidegate: {file}: trainer.loss = 'truncated': the loss is a section: write [trainer.loss] with "
        'name = "truncated_is", or --trainer.loss.name',
        f"{file}: there is no setting 'trainer.importance_cap'; did you mean 'trainer.loss.importance_cap'?",
        f"{file}: there is no setting 'trainer.lora_rank'; did you mean 'trainer.lora.rank'?",
    ]


def test_a_run_with_a_removed_section_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[model]\npath = "m"\n[trainer.curriculum]\nname = "uniform"\nfloor = 0.05\n')
    assert main(["train", str(file), "--resume"]) == ConfigError.exit_code
    assert capsys.readouterr().err == (
        f"tidegate: {file}: there is no setting 'trainer.curriculum'; it was removed, as its choice of tasks "
        "saved no tokens: remove the section, and every training task is issued in the environment's order\n"
    )
    for given in ("--trainer.curriculum.name=difficulty", "--trainer.curriculum.floor"):
        assert main(["train", "--model.path=m", given]) == ConfigError.exit_code
        assert "it was removed" in capsys.readouterr().err


def test_an_unknown_setting_is_named_with_the_place_that_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[run]\nnam = 'a'\n[model]\npath = 'm'\n")
    assert main(["train", str(file), "--trainer.max_stalness=1"]) == ConfigError.exit_code
    assert capsys.readouterr().err.splitlines() == [
        f"tidegate: {file}: there is no setting 'run.nam'; did you mean 'run.name'?",
        "the command line: there is no setting 'trainer.max_stalness'; did you mean 'trainer.max_staleness'?",
    ]


def test_an_evaluation_of_a_settings_file_names_the_option_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[model]\npath = 'm'\n")
    assert main(["eval", str(file)]) == ConfigError.exit_code
    assert f"give settings with --config {file}" in capsys.readouterr().err


def test_every_setting_is_explained() -> None:
    assert [key for key, _, text in known_keys(Settings) if not text] == []


def test_a_settings_file_is_found_wherever_it_stands() -> None:
    words = ["--run.name", "foo", "a.toml", "--trainer.steps=3", "--run.live_view", "false"]
    assert split_words(words) == (
        ["a.toml"],
        ["--run.name", "foo", "--trainer.steps=3", "--run.live_view", "false"],
    )


def test_a_number_of_engines_beside_engines_that_run_already_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.count = 2 is the number of engines to start"):
        load_settings(None, ["--model.path=x", "--engine.count=2", '--engine.urls=["http://e:1"]'])


def test_ranks_need_a_device_each():
    with pytest.raises(ConfigError, match=r"a single device, but ranks = 2"):
        load_settings(None, ["--model.path=m", "--trainer.ranks=2", "--trainer.device=cuda:1"])
    load_settings(None, ["--model.path=m", "--trainer.ranks=2", "--trainer.device=cuda"])


def test_replicas_have_equally_many_ranks():
    with pytest.raises(ConfigError, match=r"ranks = 4 are no multiple of replicas = 3"):
        load_settings(None, ["--model.path=m", "--trainer.ranks=4", "--trainer.replicas=3"])
    load_settings(None, ["--model.path=m", "--trainer.ranks=4", "--trainer.replicas=2"])


@pytest.mark.parametrize(
    ("engine", "dtype", "arguments"),
    [
        ({}, "float32", None),
        ({"device": "cuda"}, "bfloat16", None),
        ({"device": "cuda", "dtype": "float32"}, "float32", None),
        ({"kind": "sglang"}, "bfloat16", ["--dtype", "bfloat16", "--enable-fp32-lm-head"]),
        ({"kind": "vllm", "dtype": "float32"}, "float32", ["--dtype", "float32"]),
        ({"kind": "sglang", "arguments": ["--dtype=float32"]}, "float32", ["--dtype=float32"]),
        (
            {"kind": "sglang", "arguments": ["--dtype", "half"]},
            "float32",
            ["--enable-fp32-lm-head", "--dtype", "half"],
        ),
    ],
)
def test_weights_are_published_in_the_number_type_that_the_engines_are_given(
    engine: dict[str, Any], dtype: str, arguments: list[str] | None
) -> None:
    python = {"python": "/x/python"} if "kind" in engine else {}
    settings = EngineSettings(**engine, **python)
    assert settings.weights_dtype == dtype
    if arguments is not None:
        assert settings.numbered(0) == arguments


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--engine.kind=vllm"], 'needs engine.kind = "sglang", not "vllm"'),
        (["--trainer.on_policy=true"], "needs trainer.max_staleness of at least 1, not 0"),
        (["--gateway.url=http://host:8000"], "has no effect with gateway.url"),
        (
            ["--trainer.promotion.mode=evaluated", "--engine.count=2", "--eval.every=1"],
            'contradicts trainer.promotion.mode = "evaluated"',
        ),
    ],
)
def test_keys_and_values_are_kept_where_they_are_labelled(
    tmp_path: Path, more: list[str], message: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[env]\nuse = "arithmetic"\n[agent]\nuse = "solver"\n[model]\npath = "m"\n')
    kept = ["--engine.kind=sglang", "--engine.python=/opt/bin/python", "--engine.pause=in_place"]
    settings = load_settings(file, kept)
    assert "--engine.pause=in_place" in gateway_arguments(settings, "127.0.0.1")
    with pytest.raises(ConfigError, match=message):
        load_settings(file, [*kept, *more])


def test_vllm_takes_weights_from_files_only(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[env]\nuse = "arithmetic"\n[agent]\nuse = "solver"\n[model]\npath = "m"\n')
    vllm = ["--engine.kind=vllm", "--engine.python=/opt/vllm/bin/python"]
    load_settings(file, vllm)
    with pytest.raises(ConfigError, match='"vllm", which loads weights from files only'):
        load_settings(file, [*vllm, "--trainer.publish_transport=broadcast"])


def test_settings_that_differ_are_named_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[env]\nuse = "arithmetic"\n[agent]\nuse = "solver"\n[model]\npath = "m"\n')
    one = load_settings(file, ["--gateway.admin_key=SECRET"])
    changed = [
        "--gateway.admin_key=OTHER", "--trainer.max_staleness=1", "--trainer.dynamic_sampling=false",
        "--trainer.min_group_size=3", "--agent.options.token=SECRET",
    ]  # fmt: skip
    assert differences(one, load_settings(file, changed)) == [
        "agent.options.token", "gateway.admin_key", "trainer.dynamic_sampling",
        "trainer.max_staleness 2 → 1", "trainer.min_group_size",
    ]  # fmt: skip
    assert differences(one, one) == []


def test_another_kind_on_the_command_line_leaves_out_what_does_not_apply_to_it(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[model]\npath = "m"\n[engine]\nmax_slots = 8\n[trainer.loss]\nname = "dapo"\nclip_high = 0.3\n'
    )
    plain = load_settings(path)
    assert (plain.trainer.loss.name, plain.engine.max_slots) == ("dapo", 8)
    other = load_settings(path, ["--trainer.loss.name=gspo", "--engine.kind=sglang", "--engine.python=p"])
    assert other.trainer.loss == GSPOLoss()
    assert other.engine.max_slots == EngineSettings().max_slots
    again = overlay(plain, ["--trainer.loss.name=gspo", "--trainer.loss.clip_low=0.1"])
    assert again.trainer.loss == GSPOLoss(clip_low=0.1)
    same = overlay(plain, ["--trainer.loss.name=dapo"])
    assert same.trainer.loss == plain.trainer.loss
    path.write_text(dump(other))
    assert load_settings(path) == other


def test_the_same_kind_on_the_command_line_keeps_the_settings_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for loss, name in (("threshold = 0.3", "dppo"), ('use = "a.py:b"\noptions = {c = 1}', "custom")):
        path.write_text(f'[model]\npath = "m"\n[trainer.loss]\n{loss}\n')
        assert load_settings(path, [f"--trainer.loss.name={name}"]) == load_settings(path)
    assert load_settings(path, ["--trainer.loss.name=gspo"]).trainer.loss == GSPOLoss()


def test_another_source_on_the_command_line_leaves_out_the_settings_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[model]\npath = "m"\n[agent]\nuse = "a.py:b"\nworkers = 2\ndeadline_s = 9\n')
    agent = load_settings(file, ["--agent.source=remote", "--agent.heartbeat_s=2"]).agent
    assert (agent.source, agent.use, agent.workers, agent.deadline_s) == ("remote", "solver", 1, 9)


AUTO = "--trainer.loss.score_centering=auto"
CENTERABLE = "--trainer.loss.name=truncated_is"
POLICIES = ["--policies.a.learning_rate=1e-4"]
TINKER = [
    "--trainer.backend=tinker", "--engine.kind=tinker", "--trainer.tinker.base_model=m",
    "--trainer.lora.rank=4", "--trainer.learning_rate=1e-4",
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "listed", "told"),
    [
        ([], 32, "score centering over 32 ids; trainer.max_staleness = 2"),
        (["--trainer.max_staleness=none"], 32, "score centering over 32 ids; trainer.max_staleness = none"),
        (["--trainer.on_policy=true"], 0, "no score centering"),
        (
            ["--trainer.max_staleness=0", "--engine.quantize=int4"],
            32,
            'score centering over 32 ids; engine.quantize = "int4"',
        ),
        (["--engine.kind=sglang", "--engine.python=python"], 32, "score centering over 32 ids; trainer."),
        (["--engine.kind=vllm", "--engine.python=python"], 32, "score centering over 32 ids; trainer."),
        (
            [
                "--engine.kind=vllm",
                "--engine.python=python",
                "--trainer.max_staleness=0",
                '--engine.arguments=["--quantization", "fp8"]',
            ],
            32,
            "score centering over 32 ids; engine.arguments has --quantization",
        ),
        (
            ["--trainer.max_staleness=0", *POLICIES, "--policies.b.engine.quantize=int4"],
            32,
            'score centering over 32 ids; policies.b.engine.quantize = "int4"',
        ),
        (
            ["--trainer.max_staleness=0", "--policies.a.engine.count=1", "--engine.quantize=int4"],
            0,
            "no score centering",
        ),
        (
            [
                "--trainer.max_staleness=0",
                *POLICIES,
                "--policies.b.engine.quantize=int4",
                "--policies.b.train=false",
            ],
            0,
            "no score centering",
        ),
    ],
)
def test_automatic_score_centering_is_on_where_tokens_may_be_of_other_weights(
    words: list[str], listed: int, told: str
) -> None:
    settings = load_settings(None, [*MODEL, CENTERABLE, AUTO, *words])
    assert settings.trainer.loss.listed_ids == listed
    assert settings.centering.startswith(told)
    assert f"score_centering = {listed}" in dump(settings), "a replay has the number"
    plain = load_settings(None, [*MODEL, CENTERABLE, *words])
    assert plain.trainer.loss.listed_ids == 0
    assert ('"auto" is 32, as ' in plain.centering) == bool(listed)


@pytest.mark.parametrize(
    ("loss", "listed"),
    [("masked_is", 32), ("cispo", 32), ("grpo", 0), ("dr_grpo", 0), ("dapo", 0), ("dppo", 0)],
)
def test_automatic_score_centering_leaves_out_losses_that_clip_by_the_sign(loss: str, listed: int) -> None:
    name, told = f"--trainer.loss.name={loss}", f"{loss} clips by the sign of the advantage"
    settings = load_settings(None, [*MODEL, name, AUTO])
    assert settings.trainer.loss.listed_ids == listed
    assert (told in settings.centering) == (listed == 0)
    asked = load_settings(None, [*MODEL, name, "--trainer.loss.score_centering=32"])
    assert asked.trainer.loss.listed_ids == 32
    assert (told in asked.centering) == (listed == 0), "a number is not refused, but told"


def test_automatic_score_centering_is_refused_where_there_is_none() -> None:
    at_a_service = load_settings(None, [*MODEL, *TINKER])
    assert at_a_service.centering == "no score centering", "trainer.loss is not used"
    for words, message in (
        (["--trainer.loss.name=gspo"], "score_centering does not apply to name = 'gspo'"),
        (["--trainer.loss.name=masked_is", "--trainer.loss.level=sequence"], 'needs level = "token"'),
        (TINKER, 'loss is not supported by backend = "tinker": set tinker.loss'),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_settings(None, [*MODEL, *words, AUTO])


def test_vllm_is_asked_for_the_ids_that_it_keeps() -> None:
    words = [*MODEL, "--engine.kind=vllm", "--engine.python=python", "--sampling.top_p=0.9"]
    with pytest.raises(ConfigError, match="--return-sampling-mask"):
        load_settings(None, words)
    load_settings(None, [*words, '--engine.arguments=["--return-sampling-mask"]'])


def test_episodes_of_clients_are_centered_as_those_of_the_run() -> None:
    settings = load_settings(None, [*CLIENT, "--trainer.loss.score_centering=32"])
    assert "--clients.top_logprobs=32" in gateway_arguments(settings, "127.0.0.1")
    words = gateway_arguments(load_settings(None, CLIENT), "127.0.0.1")
    assert not [word for word in words if "top_logprobs" in word]


@pytest.mark.parametrize(
    ("words", "sampling"),
    [
        ([], Sampling(1.0, max_tokens=128)),
        (["--sampling.top_p=0.9"], Sampling(1.0, 0.9, 512, max_tokens=128)),
        (["--sampling.min_p=0.1", "--sampling.top_k=9"], Sampling(1.0, 1.0, 9, 0.1, max_tokens=128)),
        (["--sampling.narrowed_by_agents=true"], Sampling(narrowed_by_agents=True, max_tokens=128)),
    ],
)
def test_sampling_in_training_is_bounded_and_that_of_clients(words: list[str], sampling: Sampling) -> None:
    settings = load_settings(None, [*CLIENT, *words])
    assert settings.sampling.in_training() == sampling
    assert settings.sampling.records_kept_ids == bool(words)
    clients = [word for word in gateway_arguments(settings, "127.0.0.1") if word.startswith("--clients.")]
    assert {f"--clients.{word.removeprefix('--sampling.')}" for word in words} <= set(clients)


def test_a_judge_of_conversations_is_no_other_setting_of_an_environment() -> None:
    settings = load_settings(None, [*CLIENT, *JUDGE])
    assert settings.env.judge.rubric == "be right"


def test_the_rubric_is_on_no_command_line(tmp_path: Path) -> None:
    settings = load_settings(None, [*MODEL, *JUDGE])
    words = gateway_arguments(settings, "127.0.0.1")
    assert not [word for word in words if "judge" in word]
    secrets = judge_secrets(settings, tmp_path)
    assert secrets["judge"]["rubric"] == "be right"
    assert secrets["judge_cache"] == str(tmp_path / "judge.sqlite")
    assert judge_secrets(load_settings(None, MODEL), tmp_path) == {}


def test_criteria_are_given_as_tables(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    judge = '[env.judge]\nurl = "http://j/v1"\nmodel = "m"\nkind = "criteria"\n'
    criterion = '[env.judge.criteria.right]\nrubric = "r"\nweight = 3\n'
    file.write_text(f'[model]\npath = "m"\n{judge}{criterion}')
    settings = load_settings(file, ["--env.judge.criteria.brief.rubric=short"])
    assert settings.env.judge.shares() == {"right": 0.75, "brief": 0.25}
    again = tmp_path / "again.toml"
    again.write_text(dump(settings))
    assert load_settings(again).env.judge == settings.env.judge
    assert load_settings(file, ["--env.judge.kind=score", "--env.judge.rubric=r"]).env.judge.criteria == {}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["url=http://t", "top_k=4"], 'teacher.top_k has no effect with teacher.form = "advantage"'),
        (["weight=2"], "teacher.weight has no effect without a teacher"),
        (["hint=x"], "teacher.hint has no effect without a teacher"),
        (["url=http://t", "path=m"], "teacher.url and teacher.path both name a teacher"),
        (["path=m", "tokenizer=t"], "teacher.tokenizer has no effect without teacher.url"),
        (["url=http://t", "weight=0"], "trainer.teacher.weight = 0"),
        (["by_env={a = {}}"], "teacher.by_env.a names no teacher"),
        (
            ["url=http://t", "reward_weight=0", "--trainer.baseline=batch"],
            "baseline has no effect with teacher",
        ),
        (["url=http://t", "reward_weight=0", "--trainer.dynamic_sampling=true"], "dynamic_sampling has no"),
        (["url=http://t", "--trainer.group_size=1"], "has nothing to compare a single episode"),
        (["path=m", "--engine.kind=sglang", "--engine.python=p"], "trainer.teacher.path needs engine.kind"),
    ],
)
def test_settings_of_a_teacher_that_have_no_effect_are_refused(overrides: list[str], words: str) -> None:
    given = [one if one.startswith("--") else f"--trainer.teacher.{one}" for one in overrides]
    with pytest.raises(ConfigError) as refusal:
        load_settings(None, [*MODEL, *given])
    assert words in str(refusal.value)


def test_teachers_are_given_by_environment(tmp_path: Path) -> None:
    given = ["--trainer.teacher.path=m", '--trainer.teacher.by_env={a = {url = "http://t"}}']
    settings = load_settings(
        None, [*MODEL, *given, "--trainer.teacher.reward_weight=0", "--trainer.group_size=1"]
    )
    models = settings.trainer.teacher.models
    assert {name: (model.url, model.path) for name, model in models.items()} == {
        "": (None, Path("m")), "a": ("http://t", None),
    }  # fmt: skip
    assert settings.trainer.teacher.alone
    assert not settings.trainer.filters_equal_rewards
    file = tmp_path / "config.toml"
    file.write_text(dump(settings))
    assert load_settings(file) == settings


@pytest.mark.parametrize(
    "config", sorted(REPO.glob("examples/*/config*.toml")), ids=lambda path: path.parent.name
)
def test_shipped_configurations_set_no_staleness_bound_that_is_the_default(config: Path) -> None:
    """So that `--trainer.on_policy true` goes with them; deep research needs a bound of its own."""
    if config.parent.name != "deepresearch":
        assert load_settings(config, ["--trainer.on_policy", "true"]).trainer.max_staleness == 0


def test_a_run_from_before_the_setting_had_a_beta1_of_09(tmp_path: Path) -> None:
    file, text = tmp_path / "config.toml", saved(load_settings(None, ["--model.path", "base"]))
    file.write_text(text)
    assert load_settings(file).trainer.beta1 == 0.5
    file.write_text("\n".join(line for line in text.splitlines() if not line.startswith("beta1")))
    assert load_settings(file).trainer.beta1 == 0.9
