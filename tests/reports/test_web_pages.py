"""Web pages that call servers on this machine which have no key: DNS rebinding, and requests without CORS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes import served
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.service.local_only import LocalOnly


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A gateway without an admin key, as `tidegate gateway` starts one on loopback."""
    app = create_app(Gateway(GatewayOptions(model=make_model_dir(tmp_path / "tiny"))))
    async with served(LocalOnly(app, on_loopback=True)) as at:
        yield at


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "",
        "evil.example:80@127.0.0.1",
    ],
)
async def test_a_foreign_host_name_is_refused(url: str, host: str) -> None:
    """nomic-ai/gpt4all#3587, NousResearch/hermes-agent#21939, odysseus-dev/odysseus#2887"""
    async with aiohttp.ClientSession() as http:
        for method, path in (("GET", "/health"), ("GET", "/groups"), ("POST", "/sessions")):
            async with http.request(method, url + path, headers={"Host": host}, json={}) as reply:
                assert reply.status in (400, 403)
                assert "groups" not in await reply.text()


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "[::1]:8000", "a.localhost", "127.0.0.2"])
async def test_this_machines_names_are_accepted(url: str, host: str) -> None:
    """milady-ai/milady#564"""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/groups", headers={"Host": host}) as reply:
        assert reply.status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "text/plain;charset=UTF-8"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/json", "Origin": "https://evil.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        ({"Content-Type": "application/json", "Origin": "http://localhost:3000"}, 200),
        ({"Content-Type": "application/json"}, 200),
    ],
)
async def test_a_page_of_another_site_changes_nothing(url: str, headers: dict[str, str], status: int) -> None:
    """DavidVentura/offline-translator#284, vllm's and SGLang's control routes take any content type"""
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{url}/sessions", data=b"{}", headers=headers) as reply:
            assert reply.status == status
        async with http.post(
            f"{url}/engines", data=b'{"url": "http://127.0.0.1:1"}', headers=headers
        ) as reply:
            assert reply.status == status
