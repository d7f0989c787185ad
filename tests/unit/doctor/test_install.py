"""The checks of the installation and of ports find planted faults."""

from __future__ import annotations

import socket
from importlib import metadata

import pytest

from tests.unit.doctor.common import codes, settings_of
from tidegate.doctor.findings import Level
from tidegate.doctor.install import check_install, check_port


def test_this_installation_has_no_finding() -> None:
    assert codes(check_install(settings_of())) == []


def test_a_package_that_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "orjson":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "openai" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = check_install(settings_of())
    assert sorted(codes(found)) == ["package_missing", "package_version"]
    assert any("openai 0.1 is installed; >=" in one.text for one in found)
    assert any("the package orjson is missing" in one.text for one in found)


@pytest.mark.parametrize(("urls", "level"), [([], Level.ERROR), (["http://gpu:30000"], Level.WARNING)])
def test_torch_is_needed_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, urls: list[str], level: Level
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = {one.code: one for one in check_install(settings_of(engine={"urls": urls}))}
    assert found["no_torch"].level is level


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check_port(settings_of(gateway={"port": port}))
    assert found.code == "port_taken"
    assert f"127.0.0.1:{port}" in found.text
    assert check_port(settings_of(gateway={"port": port})).level is Level.OK
