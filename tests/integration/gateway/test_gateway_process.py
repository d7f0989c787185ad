"""The gateway as a process, and a client that waits for its restart."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FakeEngine, eventually, served
from tests.integration.gateway.control_stage import TASK, rewarder, stage
from tests.tiny_tokenizer import make_model_dir, make_tokenizer
from tidegate.errors import GatewayError, StartError
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions

__all__ = ["rewarder", "stage"]


async def test_the_client_names_the_gateway_that_did_not_respond() -> None:
    async with GatewayClient("http://127.0.0.1:9", call_s=0.3) as client:
        with pytest.raises(GatewayError, match=r"127\.0\.0\.1:9"):
            await client.list_groups()


async def test_a_gateway_that_is_given_up_is_waited_for_no_longer() -> None:
    """Calls wait for one that is started again, on a socket that its owner holds; then it is given up."""
    asked = asyncio.Event()
    held: list[asyncio.StreamWriter] = []

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        asked.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with GatewayClient(f"http://{host}:{port}") as client, asyncio.timeout(5):
            call = asyncio.create_task(client.list_engines())
            await asked.wait()
            client.abort("it died too often")
            for waited in (call, client.list_engines()):
                with pytest.raises(GatewayError, match="it died too often"):
                    await waited
        for writer in held:
            writer.close()


async def test_the_client_waits_for_a_gateway_that_comes_up(tmp_path: Path) -> None:
    engine = FakeEngine(make_tokenizer().decode)
    await engine.start()
    await engine.stop()  # its port is free now
    gateway = Gateway(GatewayOptions(model=make_model_dir(tmp_path / "tiny")))
    async with GatewayClient(engine.url, call_s=10.0) as client:
        waiting = asyncio.create_task(client.open_session(task=TASK))
        await asyncio.sleep(0)
        async with served(create_app(gateway), engine.port):
            assert (await waiting).api_key


PROCESS = """
import sys
from pathlib import Path
from tidegate.gateway.server import GatewayOptions, serve
from tidegate.service.serve import Listen
serve(GatewayOptions(model=Path(sys.argv[1]), admin_key="admin"),
      Listen(announce=Path(sys.argv[2]), owned=True))
assert "torch" not in sys.modules
"""


async def test_the_gateway_as_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    model, announce = make_model_dir(tmp_path / "tiny"), tmp_path / "gateway.json"
    command = [sys.executable, "-c", PROCESS, str(model), str(announce)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
    try:
        await eventually(lambda: announce.exists() or process.returncode is not None, 30)
        told = json.loads(announce.read_text())
        assert told["pid"] == process.pid
        async with GatewayClient(told["url"], "admin") as client:
            await client.open_session(task=TASK)
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_model_without_a_tokenizer_or_template_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="is not a directory"):
        Gateway(GatewayOptions(model=tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartError, match="cannot load the tokenizer"):
        Gateway(GatewayOptions(model=tmp_path / "empty"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(tmp_path / "bare"))
    with pytest.raises(StartError, match="no chat template"):
        Gateway(GatewayOptions(model=tmp_path / "bare"))
