"""The cache of search results, limited by bytes."""

from __future__ import annotations

from tidegate.rag.client import SearchResult
from tidegate.rag.server.query import Cache, Query


def question(n: int) -> Query:
    return Query(f"query {n}", 1, "dense")


def answer(n: int, size: int = 1000) -> list[SearchResult]:
    return [SearchResult(f"d{n}", "", "x" * size, 1.0)]


def test_the_least_recently_asked_leaves_first() -> None:
    cache = Cache(8000)
    for n in range(3):
        cache.put(question(n), answer(n))
    assert cache.get(question(0)) == answer(0)
    for n in range(3, 6):
        cache.put(question(n), answer(n))
    assert cache.bytes <= 8000
    assert cache.get(question(0)) is not None
    assert cache.get(question(1)) is None
    assert len(cache) < 6


def test_bytes_are_given_back_and_counted_once() -> None:
    cache = Cache(5000)
    for _ in range(3):
        cache.put(question(0), answer(0))
    once = cache.bytes
    assert len(cache) == 1
    cache.put(question(1), answer(1, size=10_000))
    assert (cache.get(question(1)), cache.bytes) == (None, once)
    for n in range(2, 50):
        cache.put(question(n), answer(n))
    assert 0 < cache.bytes <= 5000


def test_no_room_keeps_nothing() -> None:
    cache = Cache(0)
    cache.put(question(0), [])
    assert cache.get(question(0)) is None
