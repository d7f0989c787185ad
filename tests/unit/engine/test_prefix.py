"""The prefix cache: lookups, and the order of eviction."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.engine.requests.request import BLOCK, BlockHashes
from tidegate.engine.scheduling.prefix_cache import PrefixStore


@dataclass(frozen=True)
class Snap:
    name: str
    nbytes: int = 10


def hashes(tokens: list[int]) -> list[int]:
    return BlockHashes().for_tokens(tokens)


def add(store: PrefixStore, tokens: list[int], snap: Snap) -> None:
    store.add(tokens, hashes(tokens), snap)


def find(store: PrefixStore, tokens: list[int]) -> tuple[int, str | None]:
    length, snap = store.find(tokens, hashes(tokens))
    return length, getattr(snap, "name", None)


FIRST = list(range(40))


def test_the_longest_common_beginning_in_whole_blocks_is_found() -> None:
    store = PrefixStore(1000)
    add(store, FIRST, Snap("a"))
    assert find(store, FIRST) == (32, "a")
    assert find(store, [*FIRST, *range(100)]) == (32, "a")
    assert find(store, [*FIRST[:31], 999, *FIRST]) == (16, "a")
    assert find(store, FIRST[:15]) == (0, None)
    assert find(store, [999, *FIRST]) == (0, None)
    assert store.holds(hashes(FIRST[:16]))
    assert not store.holds(hashes([*FIRST, *FIRST]))


@given(st.lists(st.lists(st.integers(0, 1), max_size=5 * BLOCK), max_size=8), st.lists(st.integers(0, 1)))
def test_a_prefix_that_is_found_was_stored(kept: list[list[int]], sought: list[int]) -> None:
    store = PrefixStore(1000)
    for i, tokens in enumerate(kept):
        add(store, tokens, Snap(str(i)))
    length, name = find(store, sought)
    common = [_common(tokens, sought) // BLOCK * BLOCK for tokens in kept]
    assert length == max(common, default=0)
    assert length == 0 or kept[int(name or -1)][:length] == sought[:length]


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_a_continuation_supersedes_what_it_continues() -> None:
    store = PrefixStore(1000)
    add(store, FIRST, Snap("a"))
    add(store, [*FIRST, *range(30)], Snap("b"))
    assert (len(store), store.used_bytes) == (1, 10)
    assert find(store, FIRST) == (32, "b")


def test_an_equal_prompt_is_found_whole() -> None:
    store = PrefixStore(1000)
    store.add(FIRST, BlockHashes().with_rest(FIRST), Snap("a"))
    for tokens, found in ((FIRST, 40), (FIRST[:-1], 32), ([*FIRST[:-1], 999], 32), ([*FIRST, 999], 32)):
        assert store.find(tokens, BlockHashes().with_rest(tokens))[0] == found
    assert BlockHashes().with_rest(FIRST[:32]) == hashes(FIRST[:32])


def test_a_prompt_that_is_continued_goes_before_older_ones() -> None:
    store = PrefixStore(20)
    add(store, [999, *FIRST], Snap("older"))
    store.add(FIRST, BlockHashes().with_rest(FIRST), Snap("prompt"))
    add(store, [*FIRST, *range(30)], Snap("continued"))
    assert (len(store), store.used_bytes) == (2, 20)
    assert find(store, [999, *FIRST]) == (32, "older")
    assert find(store, FIRST) == (32, "continued")


def test_the_least_recently_used_goes_first() -> None:
    store = PrefixStore(30)
    others = {name: [ord(name), *FIRST] for name in "abcd"}
    for name in "abc":
        add(store, others[name], Snap(name))
    assert find(store, others["a"]) == (32, "a")  # used again
    add(store, others["d"], Snap("d"))
    assert store.used_bytes == 30
    assert [find(store, others[name])[1] for name in "abcd"] == ["a", None, "c", "d"]
    add(store, [7, *FIRST], Snap("too large", 31))
    assert len(store) == 3
    store.clear()
    assert (len(store), store.used_bytes, find(store, others["a"])) == (0, 0, (0, None))


def test_a_collision_of_hashes_is_a_miss() -> None:
    store = PrefixStore(1000)
    other = list(range(100, 140))
    store.add(other, hashes(FIRST), Snap("another sequence"))
    assert find(store, FIRST) == (0, None)


def test_a_chain_grows_with_its_sequence() -> None:
    chain = BlockHashes()
    assert chain.for_tokens(FIRST[:20]) == hashes(FIRST)[:1]
    assert chain.for_tokens(FIRST) == hashes(FIRST)
    assert chain.for_tokens(FIRST[:20]) == hashes(FIRST)[:1]


@pytest.mark.parametrize("size", [0, 9])
def test_a_store_without_room_keeps_nothing(size: int) -> None:
    store = PrefixStore(size)
    add(store, FIRST, Snap("a"))
    assert find(store, FIRST) == (0, None)
