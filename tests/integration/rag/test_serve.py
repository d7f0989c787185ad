"""The retrieval server's routes, in our format and in those of other projects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.rag_stand import FakeIndex, Stand, serving
from tests.waiting import eventually
from tidegate.rag.server import app
from tidegate.rag.server.service import MAX_K, RagOptions


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with serving(FakeIndex(), k=3) as made:
        yield made


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with http.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


async def test_several_queries_and_one(stand: Stand, http: aiohttp.ClientSession) -> None:
    answer = await post(http, f"{stand.url}/v1/search", {"queries": ["7", "1", "7"], "k": 2})
    assert [ids(rows) for rows in answer["results"]] == [["d/7", "d/8"], ["d/1", "d/2"], ["d/7", "d/8"]]
    assert answer["results"][1][0] == {"id": "d/1", "title": "Title 1", "text": "Text 1 of a.", "score": 1.0}
    answer = await post(http, f"{stand.url}/v1/search", {"query": "49", "mode": "bm25"})
    assert [ids(rows) for rows in answer["results"]] == [["d/49", "d/0", "d/1"]]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"dir": "elsewhere"}', 200, "elsewhere"),
        (b"", 200, "index"),
        (b"{}", 200, "index"),
        (b'{"dri": "x"}', 400, "unknown field dri; did you mean 'dir'"),
        (b'{"dir": 7}', 400, "dir must be a string"),
        (b"dir=x", 400, "the body is not JSON"),
    ],
)
async def test_a_reload_is_read_whatever_its_content_type_says(
    http: aiohttp.ClientSession, body: bytes, status: int, said: str
) -> None:
    """curl's is that of a form."""
    opened: list[str] = []

    def open_index(directory: Path, _: RagOptions) -> FakeIndex:
        opened.append(str(directory))
        return FakeIndex()

    async with serving(None, open_index=open_index) as (url, retrieval):
        await eventually(lambda: retrieval.ready)
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        async with http.post(f"{url}/admin/reload", data=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == status, answer
    assert said in (opened[-1] if status == 200 else answer["error"]["message"])


async def test_documents_by_id(stand: Stand, http: aiohttp.ClientSession) -> None:
    for path in ("d/7", "d%2F7"):
        async with http.get(f"{stand.url}/v1/documents/{path}") as response:
            assert await response.json() == {"id": "d/7", "title": "Title 7", "text": "Text 7 of a."}
    async with http.get(f"{stand.url}/v1/documents/nobody") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "no_such_document"


async def test_search_r1_with_scores(stand: Stand, http: aiohttp.ClientSession) -> None:
    body = {"queries": ["7", "9"], "topk": 2, "return_scores": True}
    document = {"id": "d/7", "contents": '"Title 7"\nText 7 of a.'}
    answer = await post(http, f"{stand.url}/retrieve", body)
    assert list(answer) == ["result"]
    assert answer["result"][0][0] == {"document": document, "score": 1.0}
    assert [[row["document"]["id"] for row in rows] for rows in answer["result"]] == [
        ["d/7", "d/8"],
        ["d/9", "d/10"],
    ]


async def test_search_r1_without_scores(stand: Stand, http: aiohttp.ClientSession) -> None:
    for body in ({"queries": ["7"]}, {"queries": ["7"], "topk": None, "return_scores": False}):
        answer = await post(http, f"{stand.url}/retrieve", body)
        assert answer["result"][0][0] == {"id": "d/7", "contents": '"Title 7"\nText 7 of a.'}
        assert [len(rows) for rows in answer["result"]] == [3]


async def test_one_query_with_topk(stand: Stand, http: aiohttp.ClientSession) -> None:
    answer = await post(http, f"{stand.url}/retrieve", {"query": "7", "topk": 2, "return_scores": True})
    assert [row["document"]["id"] for [*rows] in answer["result"] for row in rows] == ["d/7", "d/8"]
    answer = await post(http, f"{stand.url}/retrieve", {"query": "7", "return_scores": False})
    assert [ids(rows) for rows in answer["result"]] == [["d/7", "d/8", "d/9"]]


@pytest.mark.parametrize("name", ["top_k", "k"])
async def test_one_query_with_top_k(stand: Stand, http: aiohttp.ClientSession, name: str) -> None:
    answer = await post(http, f"{stand.url}/retrieve", {"query": "7", name: 1})
    content = '"Title 7"\nText 7 of a.'
    assert answer == {
        "query": "7",
        "method": "dense",
        "results": [{"id": "d/7", "content": content, "score": 1.0}],
        "num_results": 1,
    }
    assert (await post(http, f"{stand.url}/retrieve", {"query": "7"}))["num_results"] == 3


@pytest.mark.parametrize("query", ["", " \n"])
async def test_an_empty_query_finds_nothing(stand: Stand, http: aiohttp.ClientSession, query: str) -> None:
    answer = await post(http, f"{stand.url}/v1/search", {"queries": [query, "7"]})
    assert [len(rows) for rows in answer["results"]] == [0, 3]
    assert (await post(http, f"{stand.url}/retrieve", {"queries": [query]})) == {"result": [[]]}


async def test_more_than_there_is(stand: Stand, http: aiohttp.ClientSession) -> None:
    answer = await post(http, f"{stand.url}/v1/search", {"query": "7", "k": MAX_K})
    assert len(set(ids(answer["results"][0]))) == 50


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/search", {"query": "7", "k": 0}, 400, "k = 0: it must be between 1 and"),
        ("/v1/search", {"query": "7", "k": MAX_K + 1}, 400, "between 1 and 1000"),
        ("/v1/search", {"query": "7", "k": True}, 400, "k must be an integer"),
        ("/v1/search", {"query": "7", "k": 2.5}, 400, "k must be an integer"),
        ("/v1/search", {"query": "7", "mode": "dens"}, 400, "did you mean 'dense'"),
        ("/v1/search", {"query": "7", "topk": 1}, 400, "unknown field topk"),
        ("/v1/search", {"query": "7", "queries": ["7"]}, 400, "either query"),
        ("/v1/search", {}, 400, "either query"),
        ("/v1/search", {"queries": "7"}, 400, "queries must be a list of strings"),
        ("/v1/search", {"queries": ["7", None]}, 400, "queries must be a list of strings"),
        ("/v1/search", {"query": 7}, 400, "query must be a string"),
        ("/v1/search", {"queries": ["1"] * 5000}, 413, "5000 queries"),
        ("/v1/search", {"queries": ["1"] * 100, "k": 1000}, 413, "100 queries for 1000 documents"),
        ("/v1/search", {"query": "x" * 2**20}, 413, "query 0 has 1048576 characters"),
        ("/v1/search", {"query": "x" * 2**25}, 413, "the body is larger"),
        ("/v1/search", ["7"], 400, "not a JSON object"),
        ("/retrieve", {"queries": ["7"], "topk": 0}, 400, "k = 0: it must be between 1 and"),
        ("/retrieve", {"queries": ["7"], "return_scores": 1}, 400, "return_scores"),
        ("/retrieve", {"topk": 3}, 400, "either queries"),
    ],
)
async def test_wrong_requests_are_refused_by_name(
    stand: Stand, http: aiohttp.ClientSession, path: str, body: Any, status: int, said: str
) -> None:
    async with http.post(stand.url + path, json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (status, "invalid_request_error")
        assert said in error["message"]


async def test_a_body_that_does_not_come_is_not_waited_for(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.2)
    host, port = stand.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{"query"')
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.2 s" in answer


@pytest.mark.parametrize("data", [b"", b"{", b'{"query": "\xff"}', b'{"query": "\\ud800"}', b"[" * 5000])
async def test_what_is_no_json_is_refused(stand: Stand, http: aiohttp.ClientSession, data: bytes) -> None:
    async with http.post(f"{stand.url}/v1/search", data=data) as response:
        assert response.status == 400
        assert "not JSON" in (await response.json())["error"]["message"]


async def test_unknown_routes_have_the_error_shape(stand: Stand, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{stand.url}/nowhere") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "no_such_route"


async def test_the_index_is_described(stand: Stand, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{stand.url}/info") as response:
        assert (response.status, await response.json()) == (200, {"documents": 50, "index": None})


async def test_the_key_opens_everything_but_health(http: aiohttp.ClientSession) -> None:
    async with serving(FakeIndex(), api_key="secret") as (url, _):
        for method, path in (
            ("POST", "/v1/search"),
            ("POST", "/retrieve"),
            ("GET", "/v1/documents/d/1"),
            ("POST", "/admin/reload"),
            ("GET", "/metrics"),
            ("GET", "/info"),
        ):
            for key in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Basic secret"}):
                async with http.request(method, url + path, json={"query": "7"}, headers=key) as response:
                    assert response.status == 401, path
        right = {"Authorization": "Bearer secret"}
        async with http.post(f"{url}/v1/search", json={"query": "7"}, headers=right) as response:
            assert response.status == 200
        for path in ("/health", "/ready"):
            async with http.get(url + path) as response:
                assert response.status == 200


async def test_metrics_can_be_scraped(stand: Stand, http: aiohttp.ClientSession) -> None:
    for body in ({"query": "7"}, {"query": "7"}, {"query": "7", "k": 0}):
        async with http.post(f"{stand.url}/v1/search", json=body) as response:
            await response.read()
    async with http.get(f"{stand.url}/metrics") as response:
        families = {one.name: one for one in text_string_to_metric_families(await response.text())}
    values = {sample.name: sample.value for one in families.values() for sample in one.samples}
    assert values["tidegate_rag_queries_total"] == 2
    assert values["tidegate_rag_cache_hits_total"] == 1
    assert values["tidegate_rag_errors_total"] == 1
    assert values["tidegate_rag_batch_size_count"] == 1
    assert values["tidegate_rag_request_seconds_count"] == 2
    assert values["tidegate_rag_documents"] == 50
