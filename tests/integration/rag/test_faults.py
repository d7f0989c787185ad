"""Faults of retrieval servers: no wrong document, no lost answer, and no effect on other requests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.rag_stand import FakeIndex, Stand, serving
from tests.waiting import eventually
from tidegate.errors import CorpusError
from tidegate.progress import Progress
from tidegate.rag.build import Plan, build
from tidegate.rag.client import SearchClient
from tidegate.rag.index.searcher import Searcher
from tidegate.rag.server import service as module
from tidegate.rag.server.batcher import BatchOptions
from tidegate.rag.server.service import RagOptions
from tidegate.service.service import Service

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "junco"]


def make_index(directory: Path, label: str = "a", *, bm25: bool = False) -> Path:
    """A document a word, whose id is the word."""
    corpus = directory / f"{label}.jsonl"
    rows = [{"id": word, "title": word.title(), "text": f"The {word} of {label}."} for word in WORDS]
    corpus.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    build(Plan([corpus], directory / label, "hash", bm25=bm25), Progress(io.StringIO()))
    return directory / label


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("rag"))


def service(index: Path, directory: Path, name: str = "one", **environment: str) -> Service:
    arguments = ["serve", str(index), "--k", "1", "--window-ms", "1"]
    # The verb's action is its first argument: `tidegate rag serve …`.
    return Told(environment, "rag", lambda: arguments, directory, name=name)


class Told(Service):
    """With more in its environment."""

    def __init__(self, more: dict[str, str], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._more = more

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self._more}


async def until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        while True:
            async with http.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def asking(client: SearchClient, wrong: list[str]) -> AsyncIterator[list[int]]:
    """Sixteen clients that search without end; what they were told must be right. Yields their count."""
    asked, over = [0], asyncio.Event()

    async def ask(n: int) -> None:
        while not over.is_set():
            word = WORDS[(asked[0] + n) % len(WORDS)]
            found = await client.search(f"{word} {asked[0]}", 1)
            asked[0] += 1
            if [one.id for one in found] != [word]:
                wrong.append(word)

    clients = [asyncio.create_task(ask(n)) for n in range(16)]
    try:
        yield asked
    finally:
        over.set()
        await asyncio.gather(*clients)


@pytest.mark.slow
async def test_a_killed_server_loses_no_answer(index: Path, tmp_path: Path) -> None:
    one, two = service(index, tmp_path), service(index, tmp_path, "two")
    wrong: list[str] = []
    try:
        urls = [await one.start(), await two.start()]
        await asyncio.gather(*map(until_ready, urls))
        async with SearchClient(urls, timeout_s=60) as client, asking(client, wrong) as asked:
            for killed in (one, two):
                await eventually(lambda goal=asked[0] + 50: asked[0] >= goal, 60)
                assert killed.pid is not None
                os.kill(killed.pid, signal.SIGKILL)
                await killed.wait_for_exit()
                await eventually(lambda goal=asked[0] + 50: asked[0] >= goal, 60)
                await killed.restart()
                await until_ready(killed.url)
    finally:
        await asyncio.gather(one.stop(), two.stop())
    assert not wrong


@pytest.mark.slow
async def test_the_only_server_killed_is_waited_for(index: Path, tmp_path: Path) -> None:
    one = service(index, tmp_path)
    wrong: list[str] = []
    try:
        url = await one.start()
        await until_ready(url)
        async with SearchClient(url, timeout_s=60) as client, asking(client, wrong) as asked:
            await eventually(lambda: asked[0] >= 50, 60)
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            await one.wait_for_exit()
            await one.restart()
            await eventually(lambda goal=asked[0] + 50: asked[0] >= goal, 60)
    finally:
        await one.stop()
    assert not wrong


@pytest.mark.slow
async def test_a_process_answers_in_every_mode(tmp_path: Path) -> None:
    one = service(make_index(tmp_path, bm25=True), tmp_path, TIDEGATE_RAG_KEY="secret")
    try:
        url = await one.start()
        async with SearchClient(url, api_key="secret") as client:
            assert [found.id for found in await client.search("the heath")] == ["heath"]
            assert [found.id for found in await client.search("grove", mode="bm25")] == ["grove"]
            assert [found.id for found in await client.search("fjord", mode="hybrid")] == ["fjord"]
    finally:
        await one.stop()
    assert one.log.read_text().count("ERROR") == 0


async def serve_to_the_end(*arguments: str, **environment: str) -> tuple[int | None, str]:
    """The exit code and the last line of a server that cannot begin."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", "rag", "serve", *arguments, "--port", "0",
        stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, said = await process.communicate()
    return process.returncode, said.decode().strip().splitlines()[-1]


@pytest.mark.slow
async def test_what_cannot_be_served_ends_with_a_sentence(index: Path, tmp_path: Path) -> None:
    code, said = await serve_to_the_end(str(tmp_path))
    assert (code, "holds no index" in said) == (3, True)
    code, said = await serve_to_the_end(str(index), "--host", "0.0.0.0")
    assert (code, "TIDEGATE_RAG_KEY" in said) == (2, True)
    code, said = await serve_to_the_end(str(index), "--mode", "denes")
    assert (code, "did you mean 'dense'" in said) == (3, True)


def corrupted(directory: Path, how: str) -> Path:
    """An index that is not whole, in one of several ways."""
    made = make_index(directory, "bad")
    manifest = made / "manifest.json"
    entries = json.loads(manifest.read_text())
    inside = made / entries["generation"]
    if how == "vectors":
        path = inside / "vectors.faiss"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "documents":
        path = inside / "documents.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "encoder":
        entries["encoder"]["dimension"] = 7
        manifest.write_text(json.dumps(entries))
    elif how == "count":
        entries["documents"] = 11
        manifest.write_text(json.dumps(entries))
    else:
        manifest.write_text("{")
    return made


@pytest.mark.parametrize("how", ["vectors", "documents", "encoder", "count", "manifest"])
async def test_a_broken_index_is_refused_and_the_one_in_use_stays(
    index: Path, tmp_path: Path, how: str
) -> None:
    bad = corrupted(tmp_path, how)

    def open_index(directory: Path, options: RagOptions) -> Searcher:
        return Searcher(bad if directory == bad else index, threads=1)

    async with serving(None, open_index=open_index, k=1) as (url, retrieval), SearchClient(url) as client:
        await eventually(lambda: retrieval.ready)
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/admin/reload", json={"dir": str(bad)}) as response,
        ):
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "bad_index")
            assert "the index in use stays" in error["message"]
        assert [found.id for found in await client.search("ember")] == ["ember"]


async def test_an_index_that_cannot_be_opened_at_the_start_is_reported() -> None:
    told: list[str] = []

    def open_index(directory: Path, options: RagOptions) -> Any:
        raise CorpusError("it is broken")

    async with serving(None, open_index=open_index) as (url, retrieval), aiohttp.ClientSession() as http:
        retrieval._on_failure = told.append
        await eventually(lambda: retrieval.failed is not None)
        async with http.get(f"{url}/health") as response:
            assert (response.status, (await response.json())["reason"]) == (503, "it is broken")
        async with http.post(f"{url}/v1/search", json={"query": "7"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "loading")


async def test_while_it_loads_it_is_alive_and_not_ready() -> None:
    index = FakeIndex()
    index.gate.clear()

    def open_index(directory: Path, options: RagOptions) -> FakeIndex:
        assert index.gate.wait(30)
        return index

    async with serving(None, open_index=open_index) as (url, _), aiohttp.ClientSession() as http:
        for path, status in (("/health", 200), ("/ready", 503)):
            async with http.get(url + path) as response:
                assert response.status == status
        async with SearchClient(url, timeout_s=20) as client:
            search = asyncio.create_task(client.search("7", 1))
            await asyncio.sleep(0)
            index.gate.set()
            assert [found.id for found in await search] == ["d/7"]
        async with http.get(f"{url}/ready") as response:
            assert response.status == 200


async def test_disconnects_during_a_batch_do_not_affect_other_clients() -> None:
    index = FakeIndex()
    async with serving(index, k=1) as (url, retrieval), SearchClient(url) as client:
        index.gate.clear()
        leaving = [asyncio.create_task(client.search(str(n))) for n in range(10)]
        await eventually(lambda: len(index.batches) == 1 and retrieval.waiting == 10)
        behind = [asyncio.create_task(client.search(str(n))) for n in range(5, 20)]
        await eventually(lambda: retrieval.waiting == 25)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        await eventually(lambda: retrieval.waiting == 15)
        index.gate.set()
        found = await asyncio.gather(*behind)
        assert [one.id for [one] in found] == [f"d/{n}" for n in range(5, 20)]
    computed = [query for batch in index.batches for query in batch]
    assert len(computed) == len(set(computed))


async def test_a_slow_search_is_a_typed_answer_and_not_the_next_ones() -> None:
    index = FakeIndex()
    batches = BatchOptions(deadline_s=0.1)
    async with serving(index, k=1, batches=batches) as (url, _), aiohttp.ClientSession() as http:
        index.gate.clear()
        async with http.post(f"{url}/v1/search", json={"query": "7"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (
                503,
                "deadline",
                "retrieval_unavailable",
            )
        index.gate.set()
        async with SearchClient(url, timeout_s=10) as client:
            assert [one.id for one in await client.search("8")] == ["d/8"]


async def test_a_search_that_never_ends_is_no_good_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALL_S", 0.05)
    index = FakeIndex()
    batches = BatchOptions(deadline_s=0.1)
    async with serving(index, batches=batches) as (url, retrieval), aiohttp.ClientSession() as http:
        index.gate.clear()
        async with http.post(f"{url}/v1/search", json={"query": "7"}) as response:
            assert response.status == 503
        async with http.get(f"{url}/health") as response:
            assert response.status == 503
            assert "a search has been running for" in (await response.json())["reason"]
        index.gate.set()
        await eventually(lambda: retrieval.health_error is None)


async def test_a_search_that_raises_is_a_typed_answer_of_its_own() -> None:
    index = FakeIndex(poison="7")
    async with serving(index, k=1) as (url, _), aiohttp.ClientSession() as http:

        async def ask(n: int) -> tuple[int, Any]:
            async with http.post(f"{url}/v1/search", json={"query": str(n)}) as response:
                return response.status, await response.json()

        answers = await asyncio.gather(*map(ask, range(16)))
    assert [status for status, _ in answers] == [503 if n == 7 else 200 for n in range(16)]
    assert answers[7][1]["error"]["code"] == "search_failed"
    assert "poison" in answers[7][1]["error"]["message"]


async def test_scores_that_are_no_numbers_are_no_answer() -> None:
    class Confused(FakeIndex):
        def _matches(self, query: str, k: int) -> list[Any]:
            return [replace(match, score=float("nan")) for match in super()._matches(query, k)]

    async with (
        serving(Confused(), k=1) as (url, _),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/search", json={"query": "7"}) as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (503, "search_failed")


async def test_everyone_gets_one_answer_while_the_queue_is_full() -> None:
    index = FakeIndex(size=5000)
    batches = BatchOptions(queue=80, max_batch=64)
    async with serving(index, k=1, batches=batches) as (url, retrieval):
        index.gate.clear()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def ask(n: int) -> tuple[int, Any]:
                async with http.post(f"{url}/v1/search", json={"query": str(n)}) as response:
                    return response.status, await response.json()

            asks = [asyncio.create_task(ask(n)) for n in range(120)]
            await eventually(lambda: sum(task.done() for task in asks) == 40, 60)
            assert retrieval.waiting == 80
            index.gate.set()
            answers = await asyncio.gather(*asks)
    assert sum(status == 200 for status, _ in answers) == 80
    for n, (status, body) in enumerate(answers):
        if status == 200:
            assert body["results"][0][0]["id"] == f"d/{n}"
        else:
            assert (status, body["error"]["code"]) == (503, "overloaded")


async def reloading(stand: Stand) -> AsyncIterator[dict[str, Any]]:
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.post(f"{stand.url}/admin/reload") as response:
                yield {"status": response.status, **(await response.json())}


async def test_reloads_under_load_mix_no_indexes_and_lose_nothing() -> None:
    made = [FakeIndex(size=50 + n, label=str(n)) for n in range(5)]
    opened = iter(made)
    async with serving(None, open_index=lambda *_: next(opened), k=5) as stand:
        await eventually(lambda: stand.retrieval.ready)
        seen: list[str] = []
        over = asyncio.Event()

        async def ask(client: SearchClient, n: int) -> None:
            while not over.is_set():
                n += 1
                found = await client.search([str(n % 50), str((n + 1) % 50)])
                assert [rows[0].id for rows in found] == [f"d/{n % 50}", f"d/{(n + 1) % 50}"]
                labels = {one.text.split()[-1] for rows in found for one in rows}
                assert len(labels) == 1, labels
                seen.append(labels.pop())

        async with SearchClient(stand.url) as client:
            clients = [asyncio.create_task(ask(client, 7 * n)) for n in range(8)]
            reloads = reloading(stand)
            for n in range(1, 5):
                goal = len(seen) + 8
                await eventually(lambda goal=goal, n=n: len(seen) >= goal and f"{n - 1}." in seen)
                assert await anext(reloads) == {"status": 200, "documents": 50 + n}
                assert (await client.search("7"))[0].text.endswith(f"of {n}.")
            await eventually(lambda: "4." in seen)
            await reloads.aclose()
            over.set()
            await asyncio.gather(*clients)
    assert [label for n, label in enumerate(seen) if label not in seen[:n]] == [f"{n}." for n in range(5)]
