"""The client of retrieval servers, with servers that fail on command."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from tests.rag_stand import FakeIndex, serving
from tests.waiting import eventually
from tidegate.errors import ConfigError, RetrievalRefused, RetrievalUnavailable
from tidegate.rag.client import SearchClient, SearchResult
from tidegate.rag.corpus.corpus import Document


@dataclass
class Wobbly:
    """A server whose next answers are told: `hang`, `drop`, `garbage`, `short`, or a status; then it is
    well and finds its own name."""

    name: str = "d"
    faults: deque[str | int] = field(default_factory=deque)
    calls: int = 0
    url: str = ""

    async def search(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        asked = await request.json()
        fault = self.faults.popleft() if self.faults else None
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
        if fault == "garbage":
            return web.Response(text="<html>")
        if isinstance(fault, str) and fault.startswith("{"):
            return web.Response(text=fault, content_type="application/json")
        if isinstance(fault, int):
            error = {"message": "as asked", "type": "", "code": "told"}
            return web.json_response({"error": error}, status=fault)
        row = {"id": self.name, "title": "", "text": "", "score": 1}
        return web.json_response({"results": [] if fault == "short" else [[row] for _ in asked["queries"]]})


@pytest.fixture
async def servers() -> AsyncIterator[list[Wobbly]]:
    made, runners = [Wobbly("a"), Wobbly("b")], []
    for server in made:
        app = web.Application()
        app.router.add_post("/v1/search", server.search)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        runners.append(runner)
    yield made
    for runner in runners:
        await runner.cleanup()


def nobody() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


async def test_one_query_several_queries_and_a_document() -> None:
    async with serving(FakeIndex(), k=3) as (url, _), SearchClient(url) as client:
        assert await client.search("7", 1) == [SearchResult("d/7", "Title 7", "Text 7 of a.", 1.0)]
        found = await client.search(["7", "", "1"])
        assert [[one.id for one in rows] for rows in found] == [
            ["d/7", "d/8", "d/9"],
            [],
            ["d/1", "d/2", "d/3"],
        ]
        assert await client.search([]) == []
        assert await client.search("7", 1, "bm25") == await client.search("7", 1)
        assert await client.document("d/7") == Document("d/7", "Title 7", "Text 7 of a.")
        assert await client.document("nobody") is None
        with pytest.raises(RetrievalRefused, match="mode = 'sparse': it must be one of"):
            await client.search("7", mode="sparse")


async def test_the_key_is_sent_and_a_wrong_one_is_refused() -> None:
    async with serving(FakeIndex(), api_key="secret") as (url, _):
        async with SearchClient(url, api_key="secret") as client:
            assert len(await client.search("7", 1)) == 1
        async with SearchClient(url, api_key="wrong") as client:
            for call in (client.search("7"), client.document("d/7")):
                with pytest.raises(RetrievalRefused) as refused:
                    await call
                assert refused.value.status == 401


@pytest.mark.parametrize("fault", ["drop", "garbage", "short", 408, 429, 500, 502, 503])
async def test_one_server_too_gets_its_retries(servers: list[Wobbly], fault: str | int) -> None:
    servers[0].faults.extend([fault, fault])
    async with SearchClient(servers[0].url, timeout_s=10) as client:
        assert [one.id for one in await client.search("?")] == ["a"]
    assert servers[0].calls == 3


@pytest.mark.parametrize(
    "nonsense",
    [
        '{"results": [{}]}',
        '{"results": {}}',
        '{"results": [[{"id": "a", "title": null, "text": "x", "score": 1}]]}',
        '{"results": [[{"id": "a", "title": "x", "text": 7, "score": 1}]]}',
        '{"results": [[{"id": null, "title": "x", "text": "y", "score": 1}]]}',
        '{"results": [[{"id": "a", "title": "x", "text": "y", "score": "nan"}]]}',
    ],
)
async def test_nonsense_is_neither_an_answer_nor_an_empty_one(servers: list[Wobbly], nonsense: str) -> None:
    servers[0].faults.append(nonsense)
    async with SearchClient(servers[0].url, timeout_s=10) as client:
        assert [one.id for one in await client.search("?")] == ["a"]
    assert servers[0].calls == 2


class Named(FakeIndex):
    """Has a document of every id."""

    def find(self, id: str) -> Document | None:
        return Document(id, "", "")


@pytest.mark.parametrize("id", [".", "..", "a/../b", "/", "a b%2F?#é", "x" * 4000])
async def test_every_id_reaches_the_server_as_it_is(id: str) -> None:
    async with serving(Named()) as (url, _), SearchClient(url) as client:
        found = await client.document(id)
        assert found is not None
        assert found.id == id


async def test_what_is_no_text_is_refused_before_it_is_sent(servers: list[Wobbly]) -> None:
    async with SearchClient(servers[0].url) as client:
        for call in (client.search("\ud800"), client.search(["x", "\ud800"]), client.document("\ud800")):
            with pytest.raises(RetrievalRefused, match="not valid text"):
                await call
        with pytest.raises(RetrievalRefused, match="the id has 100000 bytes"):
            await client.document("x" * 100_000)
    assert servers[0].calls == 0


async def test_a_silent_server_leaves_time_for_another_try(servers: list[Wobbly]) -> None:
    servers[0].faults.append("hang")
    async with SearchClient(servers[0].url, timeout_s=3) as client:
        assert [one.id for one in await client.search("?")] == ["a"]


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_wrong_request_is_sent_once(servers: list[Wobbly], status: int) -> None:
    servers[0].faults.append(status)
    async with SearchClient([server.url for server in servers]) as client:
        for server in servers[1:]:
            server.faults.append(status)
        with pytest.raises(RetrievalRefused, match="as asked") as refused:
            await client.search("?")
    assert (refused.value.status, refused.value.code) == (status, "told")
    assert sum(server.calls for server in servers) == 1


async def test_a_failure_goes_to_the_other_server_at_once_and_the_first_rests(
    servers: list[Wobbly],
) -> None:
    bad, good = servers
    bad.faults.extend([503] * 50)
    async with SearchClient([bad.url, good.url], timeout_s=10) as client:
        found = [await client.search("?") for _ in range(40)]
    assert {rows[0].id for rows in found} == {"b"}
    assert bad.calls < 10  # of about 20, did it not rest


async def test_a_call_that_may_take_less_than_a_server_rests_asks_it_all_the_same(
    servers: list[Wobbly],
) -> None:
    """What failed for others was not tried for this one."""
    servers[0].faults.extend([503] * 1000)
    async with SearchClient(servers[0].url, timeout_s=0.5) as client:
        known = client._servers._servers[0]
        while known.cooldown_until - time.monotonic() < 1.0:
            known.cooldown_until = 0.0  # as if it had rested
            with pytest.raises(RetrievalUnavailable, match="as asked"):
                await client.search("?")
        servers[0].faults.clear()
        assert [one.id for one in await client.search("?")] == ["a"]


async def test_calls_go_to_the_least_busy(servers: list[Wobbly]) -> None:
    slow, quick = servers
    slow.faults.extend(["hang"] * 20)
    async with SearchClient([slow.url, quick.url], timeout_s=60) as client:
        hanging = [asyncio.create_task(client.search("?")) for _ in range(20)]
        await eventually(lambda: sum(task.done() for task in hanging) == 10)
        assert slow.calls == quick.calls == 10
        for _ in range(20):
            await client.search("?")
        assert slow.calls == 10
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


@pytest.mark.parametrize("fault", ["hang", "drop", 503])
async def test_no_answer_is_a_failure_and_never_an_empty_result(
    servers: list[Wobbly], fault: str | int
) -> None:
    for server in servers:
        server.faults.extend([fault] * 1000)
    began = time.monotonic()
    async with SearchClient([server.url for server in servers], timeout_s=1) as client:
        with pytest.raises(RetrievalUnavailable, match="no retrieval server answered within 1 s"):
            await client.search("?")
    assert time.monotonic() - began < 3
    assert sum(server.calls for server in servers) < 40  # backed off


async def test_a_connection_error_names_the_address() -> None:
    url = nobody()
    async with SearchClient(url, timeout_s=0.5) as client:
        with pytest.raises(RetrievalUnavailable, match=f"{url} cannot be reached"):
            await client.search("?")


async def test_a_cancelled_search_is_over_at_the_server_too() -> None:
    index = FakeIndex()
    async with serving(index) as (url, retrieval), SearchClient(url) as client:
        index.gate.clear()
        searches = [asyncio.create_task(client.search(query)) for query in ("1", "2")]
        await eventually(lambda: len(index.batches) == 1)
        searches.append(asyncio.create_task(client.search("3")))
        await eventually(lambda: retrieval.waiting == 3)
        for search in searches:
            search.cancel()
        await asyncio.wait(searches)
        await eventually(lambda: retrieval.waiting == 0)
        index.gate.set()
    assert "3" not in [query for batch in index.batches for query in batch]


def test_a_client_needs_a_server() -> None:
    with pytest.raises(ConfigError, match=r"'localhost:8100' is not a retrieval server's URL"):
        SearchClient(["http://a:8100", "localhost:8100"])
    with pytest.raises(ConfigError):
        SearchClient([])
