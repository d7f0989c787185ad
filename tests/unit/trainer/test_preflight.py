"""Invalid runs are refused before anything is started or written."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.tiny import make_tiny_model
from tidegate import launch
from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.errors import ConfigError, NothingToDoError, StartError
from tidegate.settings.policies import PolicySettings
from tidegate.settings.sections import dump
from tidegate.trainer import preflight
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.preflight import check_engines, check_port, check_writable
from tidegate.trainer.records.metrics import MetricsLog
from tidegate.trainer.start import Start


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Answers GET with `reply`, a status and a body; None: with nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = server.replies.get(self.path, (404, b"<html>"))  # type: ignore[attr-defined]
            if found is None:
                ended.wait(60)
                return
            self.send_response(found[0])
            self.end_headers()
            self.wfile.write(found[1])

        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

    ended = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.replies = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, b'{"weight_version": "3"}'), None),
        ((404, b"<html>"), "answers GET /model_info with 404 Not Found, so a run cannot train"),
        ((401, b"{}"), r"refuses the key of this run \(401\); give .* variable TIDEGATE_ENGINE_KEY"),
        ((200, b"<html>"), "with invalid JSON"),
        ((200, b"\xff"), "with invalid JSON"),
        ((200, b"[]"), "names no weight_version"),
        (None, "no engine answers at http://127.0.0.1:.*timed out; start the engine"),
    ],
)
def test_what_answers_for_an_engine(
    server: Any, reply: tuple[int, bytes] | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "ENGINE_S", 60.0 if reply else 0.2)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # an engine is never asked through one
    server.replies["/model_info"] = reply
    url = f"http://127.0.0.1:{server.server_port}"
    if words is None:
        check_engines([url, url])
        return
    with pytest.raises(StartError, match=rf"engine\.urls: .*{words}"):
        check_engines([url])


def test_an_address_where_nothing_listens_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            StartError, match=rf"engine\.urls: no engine answers at {url}/model_info: .*refused"
        ):
            check_engines([url])


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use; choose"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "a" / "b" / "run")
    for place in (tmp_path / "file" / "run", tmp_path / "file" / "deeper" / "run", Path("/proc/run/run")):
        with pytest.raises(
            StartError, match=rf"run\.dir = {place.parent}: cannot write {place}: .*; set run"
        ):
            check_writable(place)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def model_at(path: Path, tokenizer: str = "{}") -> Path:
    path.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text(tokenizer)
    return path


def kept_run(tmp_path: Path, model: Path, *, step: int | None, entries: list[LedgerEntry] = []) -> Settings:  # noqa: B006
    """A run's directory as its end left it: settings, ledger, and the checkpoint of `step`."""
    words = [f"--model.path={model}", f"--run.dir={tmp_path}", "--run.name=kept", "--trainer.steps=4"]
    settings = load_settings(None, words)
    settings.run_dir.mkdir(parents=True)
    (settings.run_dir / "config.toml").write_text(dump(settings))
    with Ledger(settings.run_dir / "ledger.jsonl") as ledger:
        for one in entries:
            ledger.record(one)
        if step is not None:
            checkpoint = settings.run_dir / "checkpoints" / f"step_{step}"
            shutil.copytree(model, checkpoint)
            marker = f'{{"step": {step}, "ledger": {ledger.position}}}'
            (checkpoint / "COMMITTED").write_text(marker)
    return settings


def with_model(settings: Settings, path: Path) -> Settings:
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": path})})


def test_a_run_does_not_go_on_with_another_model(tmp_path: Path) -> None:
    first, other = model_at(tmp_path / "first"), model_at(tmp_path / "other", '{"a": 1}')
    settings = kept_run(tmp_path, first, step=2)
    assert Start.of(settings, resume=True).step == 2
    (tmp_path / "link").symlink_to(first)
    assert Start.of(with_model(settings, tmp_path / "link"), resume=True).step == 2
    with pytest.raises(ConfigError, match=rf"model\.path = {other}, but the run .* began with {first}: "):
        Start.of(with_model(settings, other), resume=True)

    moved = first.rename(tmp_path / "moved")
    assert Start.of(with_model(settings, moved), resume=True).step == 2
    with pytest.raises(ConfigError, match=rf"model\.path = {other}"):
        Start.of(with_model(settings, other), resume=True)


def test_a_run_goes_on_with_the_policies_that_its_checkpoint_has(tmp_path: Path) -> None:
    settings = kept_run(tmp_path, model_at(tmp_path / "model"), step=2)
    run, both = settings.run_dir, {"a": PolicySettings(), "b": PolicySettings()}
    frozen = {"a": PolicySettings(), "b": PolicySettings(train=False)}
    with pytest.raises(ConfigError, match="trains one policy without a name, not a, b: restore"):
        Start.of(settings.model_copy(update={"policies": both}), resume=True)
    (run / "config.toml").write_text(dump(settings.model_copy(update={"policies": both})))
    assert Start.of(settings.model_copy(update={"policies": both}), resume=True).step == 2
    with pytest.raises(ConfigError, match="trains a, b, not a: restore"):
        Start.of(settings.model_copy(update={"policies": frozen}), resume=True)
    other = {**both, "b": PolicySettings(path=model_at(tmp_path / "other"))}
    with pytest.raises(ConfigError, match=r"policies\.b\.path = .*other, but the run .* began with .*model"):
        Start.of(settings.model_copy(update={"policies": other}), resume=True)
    with pytest.raises(ConfigError, match="trains a, b, not one policy without a name: restore"):
        Start.of(settings, resume=True)


WEIGHTS = "checkpoints/step_2/model.safetensors"


@pytest.mark.parametrize(
    "left", [None, "", "config.toml", "gateway/journal.sqlite", "worker.key", "logs/a", WEIGHTS]
)
def test_a_start_that_ended_before_the_run_began_is_started_again(tmp_path: Path, left: str | None) -> None:
    """facebookresearch/metaseq#544, marin-community/levanter#991, facebookresearch/fairchem#1051"""
    words = [f"--model.path={model_at(tmp_path / 'model')}", f"--run.dir={tmp_path}", "--run.name=kept"]
    settings = load_settings(None, words)
    if left is not None:
        file = settings.run_dir / left
        file.parent.mkdir(parents=True, exist_ok=True)
        if left:
            file.touch()
    assert Start.of(settings, resume="auto").epoch == 1
    with pytest.raises(ConfigError, match="holds no run to resume"):
        Start.of(settings, resume=True)


def test_a_run_is_continued_if_there_is_one(tmp_path: Path) -> None:
    begun = [entry("run", "started", epoch=3, step=0, version=5, position=None, rules={})]
    for step, entries, epoch in ((None, [], 1), (None, begun, 4), (2, begun, 4)):
        place = tmp_path / f"{step}-{epoch}"
        settings = kept_run(place, model_at(place / "model"), step=step, entries=entries)
        start = Start.of(settings, resume="auto")
        assert (start.step, start.epoch) == (step or 0, epoch)
        with pytest.raises(ConfigError, match="holds a run already"):
            Start.of(settings, resume=False)


def test_a_finished_run_has_nothing_to_resume(tmp_path: Path) -> None:
    settings = kept_run(tmp_path, model_at(tmp_path / "model"), step=4)
    with pytest.raises(NothingToDoError, match=r"has taken 4 steps.*--resume --trainer\.steps 8"):
        Start.of(settings, resume=True)
    assert NothingToDoError.exit_code == 0


def test_a_run_that_reached_its_target_has_nothing_to_resume(tmp_path: Path) -> None:
    settings = kept_run(tmp_path, model_at(tmp_path / "model"), step=2)
    with MetricsLog(settings.run_dir) as log:
        for step, reward in ((0, 0.95), (2, 0.9), (3, 1.0)):
            log.append({"step": step, "version": -1, "eval/reward": reward})

    def until(reward: float | None) -> Settings:
        trainer = settings.trainer.model_copy(update={"until": reward})
        return settings.model_copy(update={"trainer": trainer})

    with pytest.raises(
        NothingToDoError, match=r"after step 2, 0\.900, reached trainer\.until = 0\.9\. .* raise"
    ):
        Start.of(until(0.9), resume=True)
    assert Start.of(until(0.91), resume=True).step == 2
    assert Start.of(until(None), resume=True).step == 2


def test_a_run_that_was_killed_after_its_last_step_puts_its_groups_in_order(tmp_path: Path) -> None:
    live = entry("group", "issued", id="g", task="t", index=0, version=0, replaces=None)
    settings = kept_run(tmp_path, model_at(tmp_path / "model"), step=4, entries=[live])
    assert Start.of(settings, resume=True).open_groups() == {"g"}


@dataclass(frozen=True)
class Package:
    version: str
    metadata: dict[str, str] = field(default_factory=lambda: {"Name": "nvidia-nccl-cu13"})


@pytest.mark.parametrize(
    ("own", "device", "transport", "words"),
    [
        ("2.29.7", "cuda", "broadcast", "has NCCL 2.29.7, and engine.python = .* has 2.30.7; .*cu13==2.30.7"),
        ("2.30.7", "cuda", "broadcast", None),
        ("2.29.7", "cuda", "files", None),
        ("2.29.7", "cpu", "broadcast", None),
    ],
)
def test_another_nccl_in_the_engines_environment_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, device: str, transport: str, words: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf 'torch 2.14.1\\nnvidia-nccl-cu13 2.30.7\\n'\n")
    python.chmod(0o755)
    monkeypatch.setattr(preflight, "distributions", lambda: [Package(own)])
    settings = Settings.model_validate(
        {
            "model": {"path": "m"},
            "engine": {"kind": "sglang", "python": python},
            "trainer": {"device": device, "publish_transport": transport},
        }
    )
    environment = load_environment("arithmetic", {})
    monkeypatch.setattr(launch, "engine_gpus", lambda *_: [])
    if words is None:
        launch.check_surroundings(settings, environment, own_gateway=False)
        return
    for own_gateway in (False, True):  # False on a Ray cluster, which starts engines, too
        with pytest.raises(ConfigError, match=words):
            launch.check_surroundings(settings, environment, own_gateway=own_gateway)


def test_packages_are_listed_by_another_interpreter(tmp_path: Path) -> None:
    (tmp_path / "~orch-2.0.dist-info").mkdir()  # what an interrupted pip leaves: a package without a name
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", preflight.LIST_PACKAGES]
    listed = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert any(line.startswith("torch ") for line in listed.stdout.splitlines()), listed.stderr


def test_a_base_from_whose_text_model_sglang_cannot_start_is_refused(tmp_path: Path) -> None:
    size = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=size, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "images")
    make_tiny_model(tmp_path / "text")

    def settings(model: str, **engine: object) -> Settings:
        return Settings.model_validate(
            {"model": {"path": tmp_path / model}, "engine": {"kind": "sglang", "python": "p", **engine}}
        )

    with pytest.raises(StartError, match=r"without \d+ tensors such as model\.visual\..* \"vllm\""):
        preflight.check_architecture(settings("images"))
    preflight.check_architecture(settings("images", kind="vllm"))
    preflight.check_architecture(settings("images", python=None, urls=["http://e:1"]))
    preflight.check_architecture(settings("text"))
