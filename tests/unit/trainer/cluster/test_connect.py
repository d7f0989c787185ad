"""A cluster that cannot be reached gives one clear error within seconds; Ray would wait for minutes."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate.errors import ConfigError, StartError, TidegateError
from tidegate.trainer.cluster import connect


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of what takes connections and says nothing."""
    with socket.socket() as sock:
        sock.bind(("", 0))  # of 127.0.0.1 Ray makes the machine's own address
        sock.listen()
        yield f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture(autouse=True)
def of_this_test_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a cluster nor a token of this machine's."""
    monkeypatch.setattr(connect, "CONNECT_S", 0.3)
    monkeypatch.setattr(connect.services, "find_gcs_addresses", set)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def refusal(cluster: str, kind: type[TidegateError] = StartError) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as refused, connect.connected(cluster):
        pass
    assert time.monotonic() - began < 5
    said = str(refused.value)
    assert said.startswith(f"--cluster {cluster}: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize("scheme", ["ray://", ""])
def test_an_address_that_does_not_respond_is_reported(scheme: str, nobody: str, mute: str) -> None:
    assert "cannot connect" in refusal(scheme + nobody)
    assert "the server is not Ray, or does not respond within 0.3 s" in refusal(scheme + mute)


def test_auto_without_a_cluster_is_said() -> None:
    assert "Could not find any running Ray" in refusal("auto")


def test_auto_names_the_address_that_it_stands_for(
    nobody: str, mute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind = tmp_path / "ray" / "ray_current_cluster"
    left_behind.parent.mkdir()
    for address, words in ((nobody, "cannot connect"), (mute, "is not Ray")):
        left_behind.write_text(address)
        said = refusal("auto")
        assert re.match(rf"--cluster auto: [\d.]+:{address.rpartition(':')[2]}: ", said)
        assert words in said
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{nobody}")
    assert refusal("auto").startswith(f"--cluster auto: ray://{nobody}: cannot connect")


def test_what_is_no_address_is_refused() -> None:
    assert "ray://HOST:PORT" in refusal("head.internal", ConfigError)
