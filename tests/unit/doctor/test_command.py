"""Checks of an engine's reply, the command's settings, and parts of the doctor."""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.common import codes, settings_of
from tidegate.cli import doctor
from tidegate.config import Settings
from tidegate.doctor.doctor import Examination
from tidegate.doctor.engine import judge_reply
from tidegate.doctor.episode import counted
from tidegate.errors import ConfigError
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.scaffold.init import TINY_BASE
from tidegate.service.threads import within


def a_reply(renderer: Renderer) -> dict[str, Any]:
    ids = renderer.encode("#### 12 + 3")
    return {
        "output_ids": ids,
        "text": renderer.decode(ids),
        "meta_info": {
            "output_token_logprobs": [[-0.1 * (at + 1), one, None] for at, one in enumerate(ids)],
            "weight_version": "3",
            "weight_versions": [
                {"version": "2", "start": 0, "end": 2},
                {"version": "3", "start": 2, "end": len(ids)},
            ],
        },
    }


def judged(renderer: Renderer, reply: dict[str, Any]) -> list[str]:
    return codes(judge_reply("http://engine", reply, {"weight_version": "3"}, renderer))


def test_a_good_reply_has_no_finding(renderer: Renderer) -> None:
    assert judged(renderer, a_reply(renderer)) == []


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("output_ids", None, "engine_no_ids"),
        ("output_ids", [], "engine_no_ids"),
        ("output_ids", ["a"], "engine_no_ids"),
        ("meta_info", None, "engine_no_ids"),
        ("text", "Bonjour", "engine_other_tokenizer"),
        ("output_token_logprobs", [], "engine_no_logprobs"),
        ("output_token_logprobs", [[None, 1, None]], "engine_no_logprobs"),
        ("output_token_logprobs", [[-1.0, 1, None], [-2.0, 2, None]], "engine_other_logprobs"),
        ("weight_versions", None, "engine_no_versions"),
        ("weight_versions", [{"version": "default", "start": 0, "end": 6}], "engine_bad_versions"),
        ("weight_versions", [{"version": "3", "start": 0, "end": 1}], "engine_bad_versions"),
        ("weight_versions", [{"version": "3", "start": 1, "end": 6}], "engine_bad_versions"),
    ],
)
def test_a_reply_with_a_fault(renderer: Renderer, key: str, value: Any, code: str) -> None:
    reply = a_reply(renderer)
    (reply if key in reply else reply["meta_info"])[key] = value
    assert judged(renderer, reply) == [code]


@pytest.mark.parametrize("logprob", [0.5, -1000.0, math.nan])
def test_a_logprob_that_no_token_has(renderer: Renderer, logprob: float) -> None:
    reply = a_reply(renderer)
    reply["meta_info"]["output_token_logprobs"][1][0] = logprob
    assert judged(renderer, reply) == ["engine_bad_logprobs"]


def asked(*words: str) -> Settings:
    return doctor.settings_of(list(words))


def test_the_command_takes_the_settings_that_lie_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert asked().model.path == TINY_BASE
    (tmp_path / "config.toml").write_text('[model]\npath = "mine"\n[agent]\nuse = "one.py:a"\n')
    assert (asked().model.path, asked().agent.use) == (Path("mine"), "one.py:a")
    odd = 'it\'s "odd".py:a'
    given = asked(
        "--agent.use", odd, "--env.use=e.py:E", "--engine.urls=http://x:1", "--sampling.max_tokens", "9"
    )
    assert (given.agent.use, given.env.use, given.engine.urls) == (odd, "e.py:E", ["http://x:1"])
    assert given.sampling.max_tokens == 9


def test_the_command_takes_a_named_file_as_train_does(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "somewhere"\n[gateway]\nport = 7001\n')
    settings = asked(str(file), "--gateway.port", "7002")
    assert (settings.model.path, settings.gateway.port) == (Path("somewhere"), 7002)
    with pytest.raises(ConfigError, match="expected one settings file"):
        asked("a.toml", "b.toml")


def test_within_returns_raises_and_times_out() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(SystemExit):
        within(5, lambda: (_ for _ in ()).throw(SystemExit()))
    with pytest.raises(TimeoutError, match=r"^the database$"):  # the function's own
        within(5, lambda: (_ for _ in ()).throw(TimeoutError("the database")))
    with pytest.raises(TimeoutError, match=r"^$"):
        within(5, lambda: (_ for _ in ()).throw(TimeoutError()))
    ended = threading.Event()
    with pytest.raises(TimeoutError, match=r"no reply within 0\.02 s"):
        within(0.02, lambda: ended.wait(20))
    ended.set()


def test_refusals_are_read_from_the_metrics() -> None:
    text = 'tidegate_gateway_turns_total 3\ntidegate_gateway_refusals_total{code="a b"} 2\n'
    assert counted(text, "refusals_total") == {"a b": 2}


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_the_folder_of_logs_is_removed_unless_its_path_is_told(
    end: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(examination: Examination) -> None:
        (examination.folder / "logs").mkdir()
        raise end

    monkeypatch.setattr(doctor, "shield_process", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Examination, "run", interrupted)
    with pytest.raises(end):
        doctor.run(Namespace(json=True, episodes=1), [])
    assert list(tmp_path.iterdir()) == []


async def test_engines_that_have_no_gpu_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu = {"device": "cuda"}
    settings = settings_of(engine=gpu, trainer=gpu | {"publish_transport": "broadcast"})
    examination = Examination(settings, tmp_path, lambda _: None)
    async with contextlib.AsyncExitStack() as stack:
        assert await examination._engines(stack) == {}
    assert codes(examination.findings) == ["engine_does_not_start"]
