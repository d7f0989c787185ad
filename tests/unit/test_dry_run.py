"""`tidegate train --dry-run`: the memory plan's formulas against real models; nothing is changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config, Qwen2ForCausalLM

from tests import REPO
from tests.tiny import make_tiny_model
from tidegate.cli import main
from tidegate.config import Settings, load_settings, saved
from tidegate.errors import ConfigError, StartError
from tidegate.plan.dry_run import describe, obstacles
from tidegate.plan.memory import PROGRAM, check_memory, disk_plan, memory_plan, readable, run_plan
from tidegate.plan.shape import FLOAT32, read_shape
from tidegate.trainer.policy.attention import use_gpu_kernels
from tidegate.trainer.policy.forward import decoder_layers
from tidegate.trainer.policy.lora import Adapter
from tidegate.trainer.policy.working_copy import WorkingCopy
from tidegate.weights.files import WeightsError
from tidegate.weights.internals import cache_argument

EXAMPLES = REPO / "examples"
BASE = EXAMPLES / "tiny_base" / "model"


def settings_of(model: Path, run_dir: Path, **more: dict[str, object]):
    return Settings.model_validate({"model": {"path": str(model)}, "run": {"dir": str(run_dir)}, **more})


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_parameters_by_the_shape_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    model = make_tiny_model(tmp_path, family=family)
    shape = read_shape(tmp_path)
    assert shape.counted == shape.stored == sum(one.numel() for one in model.parameters())


def test_all_experts_are_counted_and_the_chosen_ones_compute() -> None:
    shape = read_shape(Path("models/Qwen3-30B-A3B"))
    assert shape.parameters == 30_532_122_624, "as its card has it, 30.5 billion"
    dense = replace(shape, sparse_layers=0, intermediate=shape.chosen * shape.expert_size)
    assert dense.activation_bytes(1000) < shape.activation_bytes(1000) < 2 * dense.activation_bytes(1000)


def test_parameters_of_a_model_with_biases(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert read_shape(tmp_path).counted == sum(one.numel() for one in model.parameters())


def test_a_published_model_needs_no_files() -> None:
    assert read_shape(Path("models/Qwen3-0.6B")).parameters == 596_049_920  # as its safetensors have it


def test_an_unknown_model_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/config\.json does not exist"):
        read_shape(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["{", "[]", '{"hidden_size": 8}'])
def test_a_config_that_is_no_decoders_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)


def test_a_weights_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"model\.safetensors.* fetch .* again"):
            read_shape(tmp_path)


def test_a_model_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    settings = settings_of(BASE, tmp_path)
    number = read_shape(BASE).parameters
    needed = number * (4 + 4 + 8 + 4)  # trainer: weights, gradients, moments; engine: weights
    check_memory(settings, lambda _: needed)
    check_memory(settings, lambda _: None)
    check_memory(settings, lambda _: needed - 4 * number, engines=False)
    with pytest.raises(StartError) as refused:
        check_memory(settings, lambda _: needed - 1)
    assert f"need at least {readable(needed)} of memory on cpu" in str(refused.value)
    assert f"and {readable(needed - 1)} are free" in str(refused.value)
    frozen = settings_of(BASE, tmp_path, trainer={"lora": {"rank": 4}}, engine={"urls": ["http://x:1"]})
    check_memory(frozen, lambda _: 5 * number)


def test_the_kv_cache_is_what_the_model_fills() -> None:
    shape = read_shape(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros((3, 17), dtype=torch.long), use_cache=True, **{cache_argument(model): cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert shape.kv_bytes(3, 17, "float32") == held == 2 * shape.kv_bytes(3, 17, "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "on_gpu"), [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]
)
def test_the_activations_are_what_pytorch_keeps(dtype: str, on_gpu: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(BASE)
    if on_gpu:
        use_gpu_kernels(model)  # as on a GPU
    short = dtype == "bfloat16"
    if on_gpu and short:
        model = WorkingCopy(model, decoder_layers, torch.bfloat16).model
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    shapes = {one.shape for one in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:  # a weight, or one in bfloat16
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=short and not on_gpu):
        hidden = model.model(input_ids=torch.randint(0, 500, (4, 128))).last_hidden_state
    assert hidden.requires_grad
    assert read_shape(BASE).activation_bytes(4 * 128, dtype, on_gpu=on_gpu) == pytest.approx(
        sum(kept.values()), rel=0.1
    )


def test_repeated_heads_are_planned_on_a_gpu_in_float32(tmp_path: Path) -> None:
    shape = read_shape(BASE)

    def activations(device: str, dtype: str) -> int:
        trainer = {"device": device, "compute_dtype": dtype, "microbatch_tokens": 1000}
        items = memory_plan(settings_of(BASE, tmp_path, trainer=trainer), shape)
        return next(item.size for item in items if item.what == "activations")

    repeated = 1000 * shape.layers * 2 * shape.heads * shape.head_dim * FLOAT32
    assert activations("cuda", "float32") == activations("cpu", "float32") + repeated
    assert activations("cuda", "bfloat16") < activations("cuda", "float32")


def test_layers_that_are_computed_again_keep_their_inputs_and_one_layer(tmp_path: Path) -> None:
    def plan(**trainer: object) -> dict[str, int]:
        items = memory_plan(settings_of(BASE, tmp_path, trainer=trainer), shape)
        return {item.what: item.size for item in items if item.owner == "trainer"}

    shape = read_shape(BASE)
    plain, again = plan(), plan(activation_checkpointing=True)
    inputs = 8192 * shape.layers * shape.hidden * FLOAT32
    assert again["activations"] == inputs + plain["activations"] // shape.layers
    assert {name for name in plain if plain[name] != again[name]} == {"activations"}
    short = plan(compute_dtype="bfloat16")
    assert short["activations"] == int(0.7 * plain["activations"]) + 2 * shape.parameters
    assert short["weights"] == plain["weights"]


def test_teachers_are_among_the_processes(tmp_path: Path) -> None:
    by_env = {"arithmetic": {"url": "http://t:1"}, "shell": {"path": str(tmp_path / "none")}}
    plan = describe(settings_of(BASE, tmp_path, trainer={"teacher": {"path": str(BASE), "by_env": by_env}}))
    assert f"teacher   tidegate engine --model.path={BASE} --weight-version 0" in plan
    assert "teacher   runs already: http://t:1  # of arithmetic" in plan
    assert f"teacher   tidegate engine --model.path={tmp_path}/none --weight-version 0  # of shell" in plan
    assert f"trainer.teacher.by_env.shell.path = {tmp_path}/none: config.json does not exist" in plan


def test_engines_that_run_already_take_nothing_here(tmp_path: Path) -> None:
    shape = read_shape(BASE)
    own = memory_plan(settings_of(BASE, tmp_path), shape)
    other = memory_plan(settings_of(BASE, tmp_path, engine={"urls": ["http://gpu:30000"]}), shape)
    assert {item.owner for item in own} - {item.owner for item in other} == {"engine"}
    sizes = {item.what: item.size for item in other}
    assert sizes["optimiser"] == 2 * sizes["weights"] == 2 * FLOAT32 * shape.parameters


def test_a_process_on_the_cpu_and_the_engines_passes_are_counted(tmp_path: Path) -> None:
    shape = read_shape(BASE)

    def plan(**sections: object) -> dict[tuple[str, str], int]:
        items = memory_plan(settings_of(BASE, tmp_path, **sections), shape)
        return {(item.owner, item.what): item.size for item in items}

    alone = plan(engine={"max_slots": 10})
    assert alone["engine", "program"] == alone["trainer", "program"] == PROGRAM
    assert plan(trainer={"ranks": 2})["trainer", "program"] == 2 * PROGRAM
    assert ("trainer", "program") not in plan(trainer={"device": "cuda"})
    wider = plan(engine={"max_slots": 20})["engine", "passes"] - alone["engine", "passes"]
    assert wider == 28 * 10 * shape.vocab


def test_ranks_share_a_machine_and_have_a_gpu_each(tmp_path: Path) -> None:
    shape = read_shape(BASE)

    def plan(**trainer: object) -> dict[str, int]:
        settings = settings_of(BASE, tmp_path, trainer={"compute_dtype": "bfloat16", **trainer})
        items = memory_plan(settings, shape)
        return {item.what: item.size for item in items if item.owner == "trainer"}

    alone, two, gpus = plan(), plan(ranks=2), plan(ranks=2, device="cuda")
    assert two["weights"] == alone["weights"] == 2 * gpus["weights"]
    assert two["activations"] == 2 * alone["activations"]
    kept = shape.activation_bytes(8192, "bfloat16", on_gpu=True)
    assert gpus["activations"] == kept + shape.gathered_bytes("bfloat16"), "layers are gathered one by one"
    replicated = plan(ranks=4, replicas=2, device="cuda")
    assert all(replicated[what] == gpus[what] for what in gpus if what != "checkpoint"), "two GPUs for each"
    assert plan(ranks=4, replicas=2)["optimiser"] == 2 * alone["optimiser"]
    settings = settings_of(BASE, tmp_path, trainer={"ranks": 3, "device": "cuda"})
    assert "the run's process and 2 more ranks, on cuda" in describe(settings)
    assert "each of 3 GPUs" in describe(settings)


def test_the_host_memory_of_a_checkpoint_is_planned(tmp_path: Path) -> None:
    shape = read_shape(BASE)

    def plan(**trainer: object) -> list[tuple[str, int, str]]:
        items = memory_plan(settings_of(BASE, tmp_path, trainer=trainer), shape)
        return [
            (item.device, item.size, item.how.rpartition(", ")[2])
            for item in items
            if item.what == "checkpoint"
        ]

    whole = 3 * FLOAT32 * shape.parameters
    assert plan() == [], "it is written from the memory of the trainer"
    assert plan(ranks=2) == [("cpu", whole, "while one is written")]
    assert plan(ranks=2, device="cuda") == plan(ranks=2)
    assert plan(ranks=4, replicas=2)[0][1] == whole + 2 * FLOAT32 * shape.parameters
    assert plan(device="cuda") == [("cpu", whole, "on --resume")]
    ((_, adapted, _),) = plan(ranks=2, lora={"rank": 3})
    assert adapted == 2 * FLOAT32 * (shape.parameters + shape.adapter(3, []))


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"]])
def test_an_adapter_is_counted_as_it_is(tmp_path: Path, targets: list[str]) -> None:
    settings = settings_of(BASE, tmp_path, trainer={"lora": {"rank": 3, "targets": targets}})
    shape, model = read_shape(BASE), AutoModelForCausalLM.from_pretrained(BASE)
    beside = Adapter.inject(model, settings.trainer.lora).parameters(model)
    trained = sum(one.numel() for one in beside.values())
    sizes = {item.what: item.size for item in memory_plan(settings, shape) if item.owner == "trainer"}
    assert sizes["weights"] == FLOAT32 * sum(one.numel() for one in model.parameters())
    assert (sizes["gradients"], sizes["optimiser"]) == (FLOAT32 * trained, 2 * FLOAT32 * trained)
    checkpoints = FLOAT32 * (shape.parameters + 3 * trained)
    assert disk_plan(settings, shape)[1].size == settings.trainer.keep_checkpoints * checkpoints


def test_the_plan_says_what_is_missing_and_touches_nothing(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "Qwen3-0.6B", tmp_path / "runs", gateway={"admin_key": "s3cret"})
    text = describe(settings)
    assert "596,049,920 parameters" in text
    assert "there is no such directory" in text
    assert "s3cret" not in text
    assert "tidegate engine --model.path=" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], None),
        (["--trainer.device=cuda"], "trainer.device = 'cuda': .*; this machine has cpu: set .* to 'cpu'"),
        (["--engine.device=cuda"], "engine.device = 'cuda': .*; this machine has cpu: set .* to 'cpu'"),
        (
            ["--trainer.device=gpu"],
            "trainer.device = 'gpu': there is no such kind of device; this machine has cpu: "
            "set trainer.device to 'cpu'",
        ),
        (["--engine.device=mps"], "engine.device = 'mps': [^\\n]{,120}; this machine has cpu"),
        (["--model.path={}/untemplated"], "model.path = .*/untemplated: it has no chat template"),
        (["--model.path={}/weightless"], "model.path = .*/weightless: it has no weights"),
        (["--model.path={}/huge"], "need at least .* of memory on cpu .* are free: "),
        (["--model.path={}/huge", "--cluster=auto"], None),
        (["--run.dir=/proc/x"], "run.dir = /proc/x: cannot write /proc/x/demo: "),
        (["--resume"], "holds no run to resume"),
        (["--resume", "auto"], None),
    ],
)
def test_a_dry_run_of_a_run_that_cannot_start_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str | None
) -> None:
    for name in ("untemplated", "weightless", "huge"):
        shutil.copytree(BASE, tmp_path / name)
    (tmp_path / "untemplated" / "chat_template.jinja").unlink()
    (tmp_path / "weightless" / "model.safetensors").unlink()
    config = json.loads((BASE / "config.json").read_text())
    layers = {"num_hidden_layers": 100_000_000}
    (tmp_path / "huge" / "config.json").write_text(json.dumps(config | layers))
    (tmp_path / "huge" / "model.safetensors").rename(tmp_path / "huge" / "model.bin")
    words = [word.format(tmp_path) for word in overrides]
    place = [str(EXAMPLES / "demo" / "config.toml"), f"--run.dir={tmp_path}", f"--model.path={BASE}"]
    assert main(["train", *place, *words, "--dry-run"]) == (0 if said is None else 3)
    text = capsys.readouterr().out
    assert re.search(said or "A dry run", text.partition("# Memory")[2]), text


@pytest.mark.parametrize(
    ("held", "how", "said"),
    [
        (True, {}, "holds a run already"),
        (True, {"resume": True}, None),
        (True, {"fresh": True}, None),
        (False, {"resume": True}, "holds no run to resume"),
        (False, {}, None),
    ],
)
def test_the_content_of_the_run_directory_is_reported(
    tmp_path: Path, held: bool, how: dict[str, bool], said: str | None
) -> None:
    if held:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "ledger.jsonl").touch()
    text = describe(settings_of(BASE, tmp_path), **how)
    assert said is None or said in text
    assert ("# Before it can start" in text) == (said is not None)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "--agent.use=my_agent.py:f",
            "my_agent.py: there is no such file to load the agent from: "
            f"looked for {Path.cwd()}/my_agent.py; give its path",
        ),
        ("--agent.use=solvr", "did you mean 'solver'?"),
        ("--env.use={}/env.py:Mine", "{}/env.py: there is no such file to load the environment from"),
        ("--agent.use={}/good.py", "good.py' is a file: name the object in it, as '{}/good.py:Name'"),
        ("--agent.use={}/good.py:solv", "good.py has no agent 'solv'; did you mean 'solve'?"),
        ("--env.use={}/good.py:Words", "good.py has no environment 'Words'; did you mean 'Word'?"),
        ("--agent.use={}/colon.py:f", "colon.py, line 3: SyntaxError: expected ':': def f(task, session)"),
        ("--env.use={}/latin.py:f", "latin.py, line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("--env.use={}/declared.py:f", "declared.py, line 3: SyntaxError: expected ':': def f(task)"),
        ("--agent.use={}/null.py:f", "null.py"),
        ("--agent.use={}/coded.py:f", "coded.py: SyntaxError: unknown encoding: klingon"),
        ("--trainer.filter={}/good.py:kep", "good.py has no filter 'kep'; did you mean 'keep'?"),
        ("--trainer.filter=none", "there is no filter 'none'; your own are 'file.py:Name'"),
        (
            "--agent.source=client --gateway.keys=k --gateway.redact={}/good.py:reda",
            "good.py has no redaction 'reda'",
        ),
        (
            "--agent.source=client --gateway.keys=k --gateway.conversation_rewards=['{}/colon.py:f']",
            "colon.py, line 3: SyntaxError",
        ),
        ("--trainer.loss.use={}/good.py:los", "good.py has no loss 'los'"),
        (
            "--env.use=dataset --env.options.rewards=['exact_match',{{use='{}/good.py:kep'}}]",
            "good.py has no reward 'kep'; did you mean 'keep'?",
        ),
        (
            "--env.use=dataset --env.options.rewards=exact_mach",
            "there is no reward 'exact_mach'; did you mean 'exact_match'?",
        ),
    ],
)
def test_an_agent_or_environment_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    for name, source in {
        "good": b"def solve(task, session): ...\ndef keep(group): ...\nif True:\n    class Word: ...\n",
        "colon": b"\n\ndef f(task, session)\n    pass\n",
        "latin": b"\nname = '\xe9'\ndef f(task, session): ...\n",
        "declared": b"# coding: latin-1\nname = '\xe9'\ndef f(task)\n    pass\n",
        "null": b"a = '\0'\ndef f(task, session): ...\n",
        "coded": b"# coding: klingon\ndef f(task, session): ...\n",
    }.items():
        (tmp_path / f"{name}.py").write_bytes(source)
    run = ["train", "--dry-run", f"--model.path={BASE}", *override.format(tmp_path).split()]
    assert main(run) == 2
    assert words.format(tmp_path) in " ".join(capsys.readouterr().err.split())


def test_a_run_is_resumed_from_another_directory_than_that_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project, copy = tmp_path / "project", tmp_path / "copy"
    run_dir = project / "runs" / "run"
    run_dir.mkdir(parents=True)
    (project / "model").symlink_to(BASE)
    (project / "agent.py").write_text("def solve(task, session): ...\n")
    (run_dir / "ledger.jsonl").touch()
    monkeypatch.chdir(project)
    settings = load_settings(None, ["--model.path=model", "--agent.use=agent.py:solve"])
    (run_dir / "config.toml").write_text(saved(settings))
    shutil.copytree(project, copy, symlinks=True)
    monkeypatch.chdir(tmp_path)
    resume = ["train", "project/runs/run/config.toml", "--resume", "--dry-run"]
    assert main(resume) == 0
    assert f"paths are relative to {project}, where the run was started" in capsys.readouterr().err
    assert Path.cwd() == project
    monkeypatch.chdir(copy)
    (copy / "runs" / "run" / "ledger.jsonl").unlink()
    assert main(["train", *resume[1:2], "--dry-run"]) == 2, "no such file"
    assert main(["train", "runs/run/config.toml", "--dry-run"]) == 0, "a copy has paths of its own"
    assert Path.cwd() == copy


@pytest.mark.parametrize(
    "source",
    [
        b"try:\n    from json import loads as f\nexcept ImportError:\n    f = None\n",
        b"# coding: latin-1\nname = '\xe9'\ndef f(task, session): ...\n",
        b"from everything import *\n",
        b"globals().update(f=print)\n",
    ],
)
def test_a_dry_run_refuses_no_name_that_a_file_may_define(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "agent.py").write_bytes(source)
    assert main(["train", "--dry-run", f"--model.path={BASE}", f"--agent.use={tmp_path}/agent.py:f"]) == 0


def test_a_dry_run_loads_neither_torch_nor_the_users_code(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("def f(task, session): ...\nraise SystemExit('the agent was loaded')")
    arguments = ["train", "--dry-run", f"--model.path={BASE}", f"--agent.use={agent}:f"]
    code = (
        f"import sys, tidegate.cli; code = tidegate.cli.main({arguments}); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "total on cpu" in done.stdout
    assert sorted(one.name for one in tmp_path.iterdir()) == ["agent.py"]


ON_CPU = ["--trainer.device=cpu", "--engine.device=cpu"]
"""A plan for GPUs imports torch, which takes seconds."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["custom_agent/launch.sh"], "874,240 parameters"),
        (["frameworks/launch.sh"], "874,240 parameters"),
        (["gsm8k/launch.sh", "tiny", "data"], "874,240 parameters"),
        (["gsm8k/launch.sh", "qwen3-0.6b", "data", *ON_CPU], "596,049,920 parameters"),
        (["search/launch.sh", "data", "index", *ON_CPU], "596,049,920 parameters"),
        (["deepresearch/launch.sh", "data", "index", *ON_CPU], "596,049,920 parameters"),
        (["gsm8k/launch-cluster.sh", "data"], "in all: 53 CPU, 8 GPU"),
        (["search/launch-cluster.sh", "data", "index"], "in all: 5 CPU, 2 GPU"),
        (["deepresearch/launch-cluster.sh", "data", "index"], "in all: 6 CPU, 2 GPU"),
    ],
)
def test_launch_scripts_pass_settings_on_from_any_directory(
    tmp_path: Path, words: list[str], expected: str
) -> None:
    (tmp_path / "data").mkdir()
    done = subprocess.run(
        [str(EXAMPLES / words[0]), *words[1:], "--dry-run", "--trainer.steps", "7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == (3 if "# Before it can start" in done.stdout else 0), done.stderr
    assert expected in done.stdout
    assert ", 7 steps" in done.stdout
    assert ("data" not in words) or f'path = "{tmp_path / "data"}' in done.stdout


def test_a_launch_script_says_how_it_is_used(tmp_path: Path) -> None:
    done = subprocess.run([str(EXAMPLES / "gsm8k/launch.sh")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: launch.sh tiny|qwen3-0.6b DATA" in done.stderr


def test_the_custom_agent_is_as_short_as_it_is_said_to_be() -> None:
    assert len((EXAMPLES / "custom_agent" / "agent.py").read_text().splitlines()) <= 20


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")]
)
def test_readable(size: int, text: str) -> None:
    assert readable(size) == text


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_published_weights_have_the_data_type_of_the_engine(tmp_path: Path, dtype: str, size: int) -> None:
    settings = settings_of(BASE, tmp_path, engine={"dtype": dtype})
    shape = read_shape(BASE)
    assert disk_plan(settings, shape)[0].size == 3 * size * shape.parameters


def test_engines_and_ranks_of_a_machine_are_planned_on_their_own_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(BASE, tmp_path, engine={"device": "cuda", "count": 2}, trainer={"device": "cuda"})
    for visible, devices in (("0", {"cuda"}), ("0,1,2", {"cuda", "cuda:1", "cuda:2"})):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert {item.device for item in memory_plan(settings, read_shape(BASE))} == {*devices, "cpu"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert any("need 1 + 2 × 1 GPUs" in fault for fault in obstacles(settings))


def test_a_missing_model_is_reported_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    settings = settings_of(Path("Qwen/Qwen3-0.6B"), tmp_path)
    [found] = [text for text in obstacles(settings) if text.startswith("model.path")]
    assert "tidegate convert Qwen/Qwen3-0.6B --out models/Qwen3-0.6B" in found


SGLANG = {"kind": "sglang", "python": "/x/python"}
VLLM = {"kind": "vllm", "python": "/x/python"}


@pytest.mark.parametrize(
    ("engine", "free", "words"),
    [
        (SGLANG, 80, r"nearly all of its memory: set \"--mem-fraction-static=0\.5\" .* 80\.0 GB \(free\)"),
        (VLLM, 80, r'set "--gpu-memory-utilization=0\.55"'),
        (SGLANG, None, r'set "--mem-fraction-static=0\.5" .* 80\.0 GB \(a usual GPU\)'),
        ({**SGLANG, "arguments": ["--mem-fraction-static", "0.7"]}, 80, r"takes 70% .*static=0\.5"),
        ({**SGLANG, "count": 2}, 80, r"static=0\.2"),
        (SGLANG, 30, r"no engine fits beside it in 30\.0 GB \(free\)"),
        ({**SGLANG, "arguments": ["--mem-fraction-static=0.5"]}, 80, None),
        ({**VLLM, "arguments": ["--gpu-memory-utilization", "0.5"]}, None, None),
        ({**SGLANG, "arguments": ["--device", "cpu"]}, 80, None),
        ({"device": "cuda"}, 80, None),
        ({**SGLANG, "urls": ["http://x:1"]}, 80, None),
    ],
)
def test_an_engine_on_the_trainers_gpu_takes_a_share_that_fits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, object],
    free: int | None,
    words: str | None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    settings = settings_of(Path("models/Qwen3-0.6B"), tmp_path, engine=engine, trainer={"device": "cuda"})

    def memory(_: str) -> int | None:
        return None if free is None else free * 10**9

    check_memory(settings, memory, engines=False)
    if words is None:
        check_memory(settings, memory)
        return
    with pytest.raises(StartError, match=words):
        check_memory(settings, memory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_memory(
        settings_of(BASE, tmp_path, engine=engine | {"count": 1}, trainer={"device": "cuda"}), memory
    )


def test_the_plan_counts_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    engine = {**SGLANG, "arguments": ["--mem-fraction-static", "0.3"]}
    settings = settings_of(Path("models/Qwen3-0.6B"), tmp_path, engine=engine, trainer={"device": "cuda"})
    (share,) = [item for item in run_plan(settings, lambda _: 40 * 10**9) if item.owner == "engine"]
    assert (share.device, share.what, share.size) == ("cuda", "share", 12 * 10**9)
    assert "engine   share" in describe(settings)
    unlimited = settings_of(Path("models/Qwen3-0.6B"), tmp_path, engine=SGLANG, trainer={"device": "cuda"})
    assert any('"--mem-fraction-static=0.5" in engine.arguments' in one for one in obstacles(unlimited))
