"""Keys of servers: an empty one is refused, as every caller could send it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import REPO
from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.service.api_key import ApiKey, key_from_environment
from tidegate.settings.reading import load
from tidegate.settings.servers import GatewayCommand
from tidegate.trainer.processes.launcher import worker_key

MODEL = str(REPO / "examples/tiny_base/model")
COMMANDS = {
    "TIDEGATE_ADMIN_KEY": ["gateway", "--model.path", MODEL, "--gateway.host", "0.0.0.0"],
    "TIDEGATE_WORKER_KEY": ["worker", "--gateway", "http://127.0.0.1:1", "--agent", "solver"],
    "TIDEGATE_ENV_KEY": ["env", "serve", "arithmetic", "--host", "0.0.0.0"],
    "TIDEGATE_ENGINE_KEY": ["engine", "--model.path", MODEL],
    "TIDEGATE_RAG_KEY": ["rag", "serve", "index", "--host", "0.0.0.0"],
}


@pytest.fixture(autouse=True)
def unshielded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("service.process_secrets", "cli.gateway", "cli.worker"):
        monkeypatch.setattr(f"tidegate.{module}.shield_process", lambda: None)


@pytest.mark.parametrize("key", ["", " \n"])
@pytest.mark.parametrize("name", COMMANDS)
def test_servers_refuse_an_empty_key(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, key)
    assert main(COMMANDS[name]) == 2
    assert f"the environment variable {name} is empty" in capsys.readouterr().err


def test_an_engine_that_joins_refuses_an_empty_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tidegate.cli.engine.shield_process", lambda: None)
    monkeypatch.setenv("TIDEGATE_ADMIN_KEY", "")
    assert main(["engine", "--model.path", MODEL, "--join", "http://127.0.0.1:1"]) == 2
    assert "TIDEGATE_ADMIN_KEY is empty" in capsys.readouterr().err


def test_a_run_refuses_an_empty_worker_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER_KEY", "")
    with pytest.raises(ConfigError, match="TIDEGATE_WORKER_KEY is empty"):
        worker_key(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_key_leaves_the_environment_without_its_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_RAG_KEY", " secret\n")
    assert [key_from_environment("TIDEGATE_RAG_KEY") for _ in range(2)] == ["secret", None]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: load(GatewayCommand, None, ["--model.path", MODEL, "--gateway.admin_key", ""]),
        lambda: ApiKey("", ValueError),
    ],
)
def test_settings_and_servers_refuse_an_empty_key(refused: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="empty"):
        refused()


def test_an_empty_header_does_not_pass() -> None:
    key = ApiKey("secret", PermissionError)
    key.check("Bearer secret")
    for header in ("", "Bearer", "Bearer ", "Bearer x"):
        with pytest.raises(PermissionError):
            key.check(header)
