"""A delayed event loop does not make the gateway quarantine a healthy engine.

The engine runs in a thread of its own, as in another process; only the gateway's loop is delayed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import orjson
import pytest

from tests.fakes import eventually
from tidegate.errors import EngineError
from tidegate.gateway.engines.client import EngineClient, ProbeTimeout
from tidegate.gateway.engines.engine import Affinity, EngineRecord, PoolOptions
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest

REPLY = {
    "output_ids": [5],
    "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 5, None]]},
}


class Engine(BaseHTTPRequestHandler):
    def _answer(self, value: Any) -> None:
        body = orjson.dumps(value)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer({"weight_version": "0", "max_context": 4096})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(REPLY)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


class Late:
    """Every round of the event loop takes so long while this is entered."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._going = True
        asyncio.get_running_loop().call_soon(self._round)

    def __exit__(self, *_: object) -> None:
        self._going = False

    def _round(self) -> None:
        if self._going:
            time.sleep(self._seconds)  # the fault that is tested
            asyncio.get_running_loop().call_soon(self._round)


async def test_a_late_loop_quarantines_no_healthy_engine(engine: str) -> None:
    pool = EnginePool(PoolOptions(connect_s=0.1, probe_timeout_s=0.2, probe_every_s=0.1))
    try:
        found = await pool.add(EngineRecord(engine), wait_s=5)
        await eventually(lambda: found.serves)
        deadline = asyncio.get_running_loop().time() + 60
        with Late(0.12):
            orders = [GenerateRequest(np.arange(3, dtype=np.int32), {}, 5) for _ in range(4)]
            replies = await asyncio.gather(
                *(pool.sample(order, Affinity(str(n), "x"), deadline) for n, order in enumerate(orders))
            )
        assert [reply.ids for reply in replies] == [[5]] * 4
        assert (pool.errors, found.quarantined) == (0, False)
    finally:
        await pool.close()


async def test_an_order_may_be_closed_after_its_sampling_has_ended(engine: str) -> None:
    """A session that finishes closes its streams, and one of them may have ended a moment before."""
    pool = EnginePool(PoolOptions())
    try:
        order = GenerateRequest(np.arange(3, dtype=np.int32), {}, 5)
        with pytest.raises(EngineError, match="deadline"):
            await pool.sample(order, Affinity("1", "x"), asyncio.get_running_loop().time())
        order.close()
        found = await pool.add(EngineRecord(engine), wait_s=5)
        await eventually(lambda: found.serves)
        order = GenerateRequest(np.arange(3, dtype=np.int32), {}, 5)
        await pool.sample(order, Affinity("2", "x"), asyncio.get_running_loop().time() + 60)
        order.close()
    finally:
        await pool.close()


async def test_a_connection_that_is_not_made_still_fails() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        taken = [socket.socket() for _ in range(4)]
        for one in taken:
            one.setblocking(False)
            one.connect_ex(full.getsockname())  # so that there is no room for another one
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        wire = EngineClient(connect_s=0.2, probe_timeout_s=0.2)
        try:
            with pytest.raises(TimeoutError, match="took longer than"):
                await asyncio.wait_for(wire.generate(url, b"{}", False, lambda _: None), 20)
            with pytest.raises(ProbeTimeout):
                await asyncio.wait_for(wire.info(url), 20)
        finally:
            await wire.close()
            for one in taken:
                one.close()
