"""Batches of queries: grouping, shared computation of equal queries, dropped queries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rag_stand import FakeIndex
from tests.waiting import eventually
from tidegate.errors import ConfigError, RetrievalUnavailable
from tidegate.rag.server import batcher as batcher_module
from tidegate.rag.server.batcher import BatchOptions, QueryBatcher
from tidegate.rag.server.metrics import RetrievalMetrics
from tidegate.rag.server.query import Query, answer_all
from tidegate.rag.server.service import RagOptions


@contextlib.asynccontextmanager
async def batcher(index: FakeIndex, **options: float) -> AsyncIterator[QueryBatcher]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="search")
    settings = BatchOptions(**{"window_s": 0.0, **options})  # type: ignore[arg-type]
    made = QueryBatcher(
        lambda questions: answer_all(index, questions), executor, settings, RetrievalMetrics()
    )
    try:
        yield made
    finally:
        index.gate.set()
        await made.close()
        executor.shutdown()


async def ask(made: QueryBatcher, *queries: str, k: int = 1, mode: str = "dense") -> list[str]:
    """The best document of each query."""
    found = await made.answer([Query(query, k, mode) for query in queries])
    return [rows[0].id for rows in found]


async def busy(made: QueryBatcher, index: FakeIndex) -> asyncio.Task[list[str]]:
    """A batch of the query "0" that is computed until the index' gate opens."""
    index.gate.clear()
    task = asyncio.create_task(ask(made, "0"))
    await eventually(lambda: made.running_since is not None)
    return task


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"queue": 0}, {"deadline_s": 0}, {"window_s": -1}])
def test_options_that_nothing_could_be_answered_with_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        BatchOptions(**options)  # type: ignore[arg-type]
    for wrong in ({"k": 0}, {"k": 5000}, {"threads": 0}, {"cache_bytes": -1}):
        with pytest.raises(ConfigError, match="at least"):
            RagOptions(Path("index"), **wrong)  # type: ignore[arg-type]


async def test_a_batch_is_gathered_from_its_first_question_on() -> None:
    index = FakeIndex()
    async with batcher(index, window_s=0.2) as made:
        assert await asyncio.gather(*(ask(made, str(n)) for n in range(8))) == [[f"d/{n}"] for n in range(8)]
    assert index.batches == [tuple("01234567")]
    assert all(name.startswith("search") for name in index.searched_in)


async def test_a_full_batch_does_not_wait() -> None:
    index = FakeIndex()
    async with batcher(index, window_s=60, max_batch=2) as made, asyncio.timeout(10):
        await asyncio.gather(ask(made, "1"), ask(made, "2"))
    assert index.batches == [("1", "2")]


async def test_a_lone_client_has_no_window_until_a_batch_has_several_queries() -> None:
    index = FakeIndex()
    async with batcher(index, window_s=60, max_batch=2) as made, asyncio.timeout(10):
        for query in "012":
            await ask(made, query)
        await ask(made, "3", "4")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(made, "5")
    assert index.batches == [("0",), ("1",), ("2",), ("3", "4")]


async def test_what_came_while_a_batch_was_computed_does_not_wait_again() -> None:
    index = FakeIndex()
    async with batcher(index, window_s=1.0, max_batch=2) as made:
        index.gate.clear()
        first = asyncio.create_task(ask(made, "0", "1"))
        await eventually(lambda: made.running_since is not None)
        later = asyncio.create_task(ask(made, "2"))
        await asyncio.sleep(1.05)  # its window passes behind the batch before it
        index.gate.set()
        opened = time.monotonic()
        assert await later == ["d/2"]
        assert time.monotonic() - opened < 0.7
        await first
    assert index.batches == [("0", "1"), ("2",)]


async def test_callers_that_ask_again_are_in_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for share in ("_PAUSE", "_LONGEST"):  # a batch that is not full waits for ever
        monkeypatch.setattr(batcher_module, share, 1e9)
    index = FakeIndex()
    async with batcher(index, window_s=0.001, max_batch=3) as made:

        async def caller(*queries: str) -> None:
            for query in queries:
                await ask(made, query)

        index.gate.clear()
        callers = [asyncio.create_task(caller("0", "3")), asyncio.create_task(caller("1", "4"))]
        await eventually(lambda: made.running_since is not None)
        callers.append(asyncio.create_task(caller("2")))
        index.gate.set()
        await asyncio.gather(*callers)
    assert list(map(set, index.batches)) == [{"0", "1"}, {"2", "3", "4"}]


async def test_a_batch_has_a_size_and_a_request_may_be_larger() -> None:
    index = FakeIndex()
    async with batcher(index, max_batch=3) as made:
        assert await ask(made, *map(str, range(8))) == [f"d/{n}" for n in range(8)]
    assert list(map(len, index.batches)) == [3, 3, 2]


async def test_equal_questions_under_way_are_computed_once() -> None:
    index = FakeIndex()
    async with batcher(index) as made:
        running = await busy(made, index)
        others = [asyncio.create_task(ask(made, query)) for query in ("0", "7", "7")]
        await eventually(lambda: made.waiting == 4)
        index.gate.set()
        assert await asyncio.gather(running, *others) == [["d/0"], ["d/0"], ["d/7"], ["d/7"]]
    assert index.batches == [("0",), ("7",)]


async def test_questions_that_differ_in_k_or_mode_are_not_equal() -> None:
    index = FakeIndex()
    async with batcher(index, window_s=0.2) as made:
        one, two, other = await asyncio.gather(
            made.answer([Query("7", 1, "dense")]),
            made.answer([Query("7", 2, "dense")]),
            made.answer([Query("7", 3, "bm25")]),
        )
    assert [len(rows) for [rows] in (one, two, other)] == [1, 2, 3]
    assert sorted(index.batches) == [("7",), ("7", "7")]


async def test_more_than_may_wait_is_refused_and_nothing_of_it_is_computed() -> None:
    index = FakeIndex()
    async with batcher(index, queue=3) as made:
        running = await busy(made, index)
        waiting = asyncio.create_task(ask(made, "1", "2"))
        await eventually(lambda: made.waiting == 3)
        with pytest.raises(RetrievalUnavailable) as refused:
            await ask(made, "3")
        assert refused.value.code == "overloaded"
        index.gate.set()
        assert (await running, await waiting) == (["d/0"], ["d/1", "d/2"])
        assert await ask(made, "3") == ["d/3"]
        assert made.waiting == 0
    assert index.batches == [("0",), ("1", "2"), ("3",)]


async def test_a_deadline_ends_the_wait_and_drops_the_question() -> None:
    index = FakeIndex()
    async with batcher(index, deadline_s=0.05) as made:
        index.gate.clear()
        for query in ("0", "1"):
            with pytest.raises(RetrievalUnavailable) as late:
                await ask(made, query)
            assert late.value.code == "deadline"
        index.gate.set()
        await eventually(lambda: made.running_since is None)
        assert await ask(made, "2") == ["d/2"]
    assert index.batches == [("0",), ("2",)]


async def test_a_query_without_callers_is_not_computed() -> None:
    index = FakeIndex()
    async with batcher(index) as made:
        running = await busy(made, index)
        gone, shared, stays = (asyncio.create_task(ask(made, query)) for query in ("1", "2", "2"))
        await eventually(lambda: made.waiting == 4)
        for task in (gone, shared):
            task.cancel()
        await asyncio.wait((gone, shared))
        index.gate.set()
        assert (await running, await stays) == (["d/0"], ["d/2"])
    assert index.batches == [("0",), ("2",)]


async def test_a_question_that_makes_the_search_fail_fails_alone() -> None:
    index = FakeIndex(poison="3")
    async with batcher(index, window_s=0.2) as made:
        answers = await asyncio.gather(*(ask(made, str(n)) for n in range(8)), return_exceptions=True)
        assert [answer for n, answer in enumerate(answers) if n != 3] == [
            [f"d/{n}"] for n in range(8) if n != 3
        ]
        assert isinstance(answers[3], RetrievalUnavailable)
        assert answers[3].code == "search_failed"
        assert await ask(made, "4") == ["d/4"]


async def test_callers_that_wait_at_the_end_get_an_error() -> None:
    index = FakeIndex()
    async with batcher(index) as made:
        running = await busy(made, index)
        waiting = asyncio.create_task(ask(made, "1"))
        await eventually(lambda: made.waiting == 2)
        await made.close()
        for task in (running, waiting):
            with pytest.raises(RetrievalUnavailable) as ended:
                await task
            assert ended.value.code == "stopping"


async def test_draining_answers_everything_first() -> None:
    index = FakeIndex()
    async with batcher(index, max_batch=1) as made:
        running = await busy(made, index)
        waiting = asyncio.create_task(ask(made, "1", "2"))
        await eventually(lambda: made.waiting == 3)
        drained = asyncio.create_task(made.drain())
        index.gate.set()
        assert (await running, await waiting) == (["d/0"], ["d/1", "d/2"])
        await drained
