"""The address that a server announces can be reached by other processes."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from tidegate.service.address import WILDCARDS, reachable_address
from tidegate.service.serve import Listen, bind, url_of


def test_a_server_on_all_interfaces_announces_a_reachable_address() -> None:
    with bind(Listen("0.0.0.0")) as sock:
        sock.listen()
        url = urlsplit(url_of(sock))
        assert url.hostname not in WILDCARDS
        with socket.create_connection((url.hostname, url.port or 0), timeout=10):
            pass


def test_without_a_network_the_address_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert (reachable_address(), reachable_address("::"), reachable_address("10.0.0.7")) == (
        "127.0.0.1",
        "::1",
        "10.0.0.7",
    )
