"""A foreign server that a run starts: its command, readiness and end. The real one: tests/sglang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import gone
from tests.unit.trainer.learning_fixtures import make_model
from tidegate.config import EngineSettings, Settings, TrainerSettings, load_settings
from tidegate.errors import ConfigError, StartError
from tidegate.trainer.cluster.actors import ServerActor
from tidegate.trainer.cluster.environment import GLOO_INTERFACE, ActorContext, SharedDirProbe
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.processes.servers import (
    LINEAR_LAYERS,
    SGLangServer,
    engine_server,
    sglang_options,
    vllm_options,
)

SERVER = """#!{python}
import http.server, json, os, pathlib, sys
pathlib.Path({said!r}).write_text(json.dumps({{"argv": sys.argv, "environment": dict(os.environ)}}))
class Well(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Well.asked += 1
        self.send_response(503 if Well.asked < 3 else 200)  # it warms up first
        self.end_headers()
    def log_message(self, *_): pass
host, port = (sys.argv[sys.argv.index(one) + 1] for one in ("--host", "--port"))
http.server.HTTPServer((host, int(port)), Well).serve_forever()
"""


def stand_in(tmp_path: Path, text: str = SERVER) -> Path:
    """An interpreter that serves, whatever it is told to run."""
    python = tmp_path / "python"
    python.write_text(text.format(python=sys.executable, said=str(tmp_path / "said.json")))
    python.chmod(0o755)
    return python


async def test_sglang_starts_with_the_live_weights_and_is_ready_when_it_responds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/interpreter")
    monkeypatch.setattr(SGLangServer, "poll_s", 0.02)
    arguments = ["--base-gpu-id", "{index}"]
    settings = EngineSettings(kind="sglang", python=stand_in(tmp_path), arguments=arguments)
    server = SGLangServer(settings, lambda: (tmp_path / "v7", 7), tmp_path, "engine-2", 1)
    server.variables = {"CUDA_VISIBLE_DEVICES": "5"}
    url = await server.start()
    said = json.loads((tmp_path / "said.json").read_text())
    words = said["argv"][1:]
    assert words[:2] == ["-m", "sglang.launch_server"]
    assert said["environment"]["CUDA_VISIBLE_DEVICES"] == "5"
    assert words[words.index("--model-path") + 1] == str(tmp_path / "v7")
    assert words[words.index("--weight-version") + 1] == "7"
    assert words[-2:] == ["--base-gpu-id", "1"]
    assert "PYTHONPATH" not in said["environment"]
    assert json.loads((tmp_path / "logs" / "engine-2.address").read_text()) == {"url": url, "pid": server.pid}
    pid = server.pid
    assert pid is not None
    await server.stop()
    assert gone(pid)


async def test_sglang_starts_with_the_base_model_and_the_live_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SGLangServer, "poll_s", 0.02)
    base, adapter = make_model(tmp_path / "base"), tmp_path / "v7"
    Policy.load(base, TrainerSettings(lora={"rank": 4, "publish": "adapter"})).save_adapter(adapter)
    settings = EngineSettings(kind="sglang", python=stand_in(tmp_path))
    server = SGLangServer(settings, lambda: (adapter, 7), tmp_path, "engine", 0)
    await server.start()
    words = json.loads((tmp_path / "said.json").read_text())["argv"][1:]
    assert words[words.index("--model-path") + 1] == str(base)
    assert words[words.index("--weight-version") + 1] == "v7"
    assert words[words.index("--lora-paths") + 1] == f"v7={adapter}"
    await server.stop()
    make_model(base, seed=1)
    with pytest.raises(StartError, match=r"its base model .* the files were replaced since the training"):
        await server.start()


@pytest.mark.parametrize(("targets", "layers"), [([], LINEAR_LAYERS), (["o_proj"], ["o_proj"])])
def test_sglang_gets_the_rank_and_the_layers_of_adapters(targets: list[str], layers: Sequence[str]) -> None:
    lora = {"rank": 12, "targets": targets, "publish": "adapter"}
    engine = {"kind": "sglang", "python": "p"}
    settings = Settings.model_validate({"model": {"path": "m"}, "engine": engine, "trainer": {"lora": lora}})
    assert sglang_options(settings) == [
        "--enable-lora", "--max-lora-rank", "12", "--lora-target-modules", *layers,
        "--max-loras-per-batch", "3",
    ]  # fmt: skip


def settings_of(policies: dict[str, Any], lora: dict[str, Any], kind: str) -> Settings:
    given = {"model": {"path": "m"}, "engine": {"kind": kind, "python": "p"}, "policies": policies}
    return Settings.model_validate(given | {"trainer": {"lora": lora}})


def test_sglang_gets_what_the_adapters_of_all_policies_need() -> None:
    lora = {"rank": 4, "targets": ["o_proj"], "publish": "adapter"}
    loras = {"a": lora, "b": lora | {"rank": 8, "targets": ["down_proj", "o_proj"]}, "c": None}
    policies = {name: {"lora": own, "train": name != "c"} for name, own in loras.items()}
    settings = settings_of(policies, lora | {"rank": 64}, "sglang")
    assert sglang_options(settings.of_engines("a")) == [
        "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "o_proj", "down_proj",
        "--max-loras-per-batch", "5",
    ]  # fmt: skip
    assert vllm_options(settings.of_engines("a")) == [
        "--enable-lora", "--max-lora-rank", "8", "--max-loras", "4",
    ]  # fmt: skip
    frozen = settings_of({"a": {}, "b": {"train": False}}, lora | {"rank": 64}, "vllm")
    assert vllm_options(frozen.of_engines("b")) == []


async def test_sglang_starts_with_the_adapters_of_all_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SGLangServer, "poll_s", 0.02)
    policy = Policy.load(
        make_model(tmp_path / "base"), TrainerSettings(lora={"rank": 4, "publish": "adapter"})
    )
    places = [policy.save_adapter(tmp_path / "v7" / name) for name in ("a", "b-1")]
    settings = EngineSettings(kind="sglang", python=stand_in(tmp_path))
    server = SGLangServer(settings, lambda: (tmp_path / "v7", 7), tmp_path, "engine", 0)
    await server.start()
    words = json.loads((tmp_path / "said.json").read_text())["argv"][1:]
    assert words[words.index("--model-path") + 1] == str(tmp_path / "base")
    assert words[words.index("--weight-version") + 1] == "v7-"
    at = words.index("--lora-paths")
    assert words[at + 1 : at + 3] == [f"v7-a={places[0]}", f"v7-b-1={places[1]}"]
    await server.stop()


async def test_a_killed_servers_workers_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGLangServer, "poll_s", 0.02)
    worker = "import pathlib, subprocess\npid = subprocess.Popen(['sleep', '60']).pid\n"
    note = f"pathlib.Path({str(tmp_path / 'worker')!r}).write_text(str(pid))\n"
    python = stand_in(tmp_path, SERVER.replace("class Well", worker + note + "class Well"))
    settings = EngineSettings(kind="sglang", python=python)
    server = SGLangServer(settings, lambda: (tmp_path, 0), tmp_path, "engine", 0)
    await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert "SIGKILL" in await server.wait_for_exit()
    assert gone(int((tmp_path / "worker").read_text()), timeout=5)


async def test_an_actor_of_a_cluster_owns_it_as_a_run_on_one_machine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the node's address, with the variables that came along; killed, it is started with what is live."""
    monkeypatch.setattr(SGLangServer, "poll_s", 0.02)
    for name in ("PYTHONPATH", "SGLANG_WORD", GLOO_INTERFACE):  # an actor changes its process's
        monkeypatch.setenv(name, "of this process")
    python = stand_in(tmp_path)
    given = ["--model.path=x", "--engine.kind=sglang", f"--engine.python={python}"]
    settings = load_settings(None, [*given, "--trainer.routing_replay=true"])
    context = ActorContext(
        "a", SharedDirProbe.create(tmp_path / "run"), Path.cwd(), {"SGLANG_WORD": "of the command"}
    )
    actor = ServerActor(context, partial(engine_server, settings, "engine-2", 1, "key"))

    async def started(version: int) -> tuple[str, int]:
        url = await actor.start(0, tmp_path / f"v{version}", version)
        said = json.loads((tmp_path / "said.json").read_text())
        words, environment = said["argv"], said["environment"]
        assert url == "http://{}:{}".format(*(words[words.index(one) + 1] for one in ("--host", "--port")))
        assert words[words.index("--model-path") + 1] == str(tmp_path / f"v{version}")
        assert words[words.index("--weight-version") + 1] == str(version)
        assert environment["SGLANG_WORD"] == "of the command"
        assert "--enable-return-routed-experts" in words
        assert "PYTHONPATH" not in environment
        return url, json.loads((tmp_path / "run" / "logs" / "engine-2.address").read_text())["pid"]

    url, pid = await started(3)
    assert url.startswith(f"http://{actor.node.address}:")
    os.kill(pid, signal.SIGKILL)
    how, _ = await actor.wait_for_exit()
    assert "engine-2 was killed by SIGKILL" in how
    again, pid = await started(5)
    assert again == url
    await actor.clean_up()
    assert gone(pid)


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    python = stand_in(tmp_path, "#!{python}\nraise SystemExit('no GPU here')\n")
    settings = EngineSettings(kind="sglang", python=python)
    server = SGLangServer(settings, lambda: (tmp_path, 0), tmp_path, "engine", 0)
    with pytest.raises(StartError, match=r"the engine did not start: no GPU here \(log: .*engine\.log\)"):
        await server.start()


@pytest.mark.parametrize("ignores", [False, True], ids=["", "ignores SIGTERM"])
def test_a_program_run_by_parent_death_ends_with_a_killed_parent(ignores: bool) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if ignores else ""
    child = f"import signal, sys, time; {ignore}print('up', flush=True); time.sleep(600)"
    parent = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'tidegate.service.parent_death', str(os.getpid())]\n"
        f"command += [sys.executable, '-c', {child!r}]\n"
        "for _ in range(2):\n"
        "    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)\n"
        "    process.stdout.readline()\n"
        "    print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        running, stopped = (int(process.stdout.readline()) for _ in range(2))
        os.kill(stopped, signal.SIGSTOP)
        process.send_signal(signal.SIGKILL)
        assert gone(running)
        assert gone(stopped)


def test_a_program_whose_parent_died_already_is_not_started() -> None:
    command = [
        sys.executable,
        "-m",
        "tidegate.service.parent_death",
        "1",
        sys.executable,
        "-c",
        "print('up')",
    ]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine.kind=sglang"], "needs engine.python"),
        (["--engine.python=/x/python"], 'are for engine.kind = "sglang"'),
        (["--engine.arguments=['-x']"], 'are for engine.kind = "sglang"'),
        (["--engine.kind=vllm"], "needs engine.python"),
        (["--engine.kind=sgl"], "embedded"),
        (
            ["--engine.kind=vllm", "--engine.python=/x/python", "--trainer.routing_replay=true"],
            "routing_replay needs .* vllm returns no experts",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(Path("examples/demo/config.toml"), words)
