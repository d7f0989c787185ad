"""Bodies that repeat earlier ones have the value and the digest of a full parse, or are parsed in full."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.gateway.errors import ApiError
from tidegate.gateway.sessions.body_prefixes import MAX_SCAN, BodyPrefixes
from tidegate.gateway.sessions.model_calls import digest_of
from tidegate.gateway.turns.request_reader import parse

POSITION = b"chat/0/"


class Reader:
    """Reads bodies as the gateway does, and counts those that were not parsed in full."""

    def __init__(self) -> None:
        self.prefixes = BodyPrefixes()
        self.repeated = 0

    def read(self, body: bytes | bytearray, position: bytes = POSITION) -> Any:
        repeated = self.prefixes.find(position, body)
        found = None if repeated is None else self.prefixes.read(repeated, body, parse)
        if found is not None:
            self.repeated += 1
            value, digest = found
        else:
            value = parse(body)
            digest = self.prefixes.remember(position, body, value)
        assert digest == digest_of(position, body)
        return value


def outcome(read: Callable[[bytes | bytearray], Any], body: bytes | bytearray) -> bytes | str:
    try:
        return orjson.dumps(read(body))
    except ApiError as error:
        return str(error)


def read_alike(reader: Reader, body: bytes | bytearray) -> None:
    assert outcome(reader.read, body) == outcome(parse, body)


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body_of(*texts: str, **fields: Any) -> bytes:
    return orjson.dumps({"messages": [message(text) for text in texts], **fields})


def test_only_the_messages_that_are_new_are_parsed() -> None:
    reader = Reader()
    first = reader.read(body_of("a", "b", model="m"))
    second = reader.read(body_of("a", "b", "c", model="m", stream=True))
    assert second == {"messages": [message(text) for text in "abc"], "model": "m", "stream": True}
    assert [one is two for one, two in zip(first["messages"], second["messages"], strict=False)] == [True] * 2
    third = reader.read(body_of("a", "b", "c", model="m", stream=True))
    assert (third, reader.repeated) == (second, 2)


def test_an_edited_history_is_parsed_in_full() -> None:
    reader = Reader()
    for texts in (("a", "b"), ("a", "x", "c"), ("a", "bb"), ("a",)):
        read_alike(reader, body_of(*texts))
    assert reader.repeated == 0


def test_conversations_of_one_session_are_told_apart() -> None:
    reader = Reader()
    for length in range(1, 5):
        for name in "xyz":
            read_alike(reader, body_of(*(f"{name}{number}" for number in range(length))))
    assert reader.repeated == 9


def test_only_the_newest_prefixes_are_kept() -> None:
    reader = Reader()
    for name in "vwxyz":
        reader.read(body_of(name))
    read_alike(reader, body_of("v", "more"))
    assert reader.repeated == 0
    read_alike(reader, body_of("z", "more"))
    assert reader.repeated == 1


def test_another_position_does_not_match() -> None:
    reader = Reader()
    reader.read(body_of("a"))
    reader.read(body_of("a", "b"), b"messages/0/")
    assert reader.repeated == 0


A = b'{"role":"user","content":"a"}'
START = b'{"messages":[' + A


@pytest.mark.parametrize(
    ("first", "second", "repeats"),
    [
        (START + b"]}", START + b" , " + A + b" ] }", True),
        (START + b" ] }", START + b"," + A + b"]}", True),
        (START + b"]}", START + b",]}", False),
        (START + b"]}", START + b",,1]}", False),
        (START + b"]}", START + b"," + A + b"}", False),
        (START + b"]}", START + b"," + A + b"]", False),
        (START + b"]}", START + b"," + A + b"]}]", False),
        (START + b"]}", START + b"x]}", False),
        (START + b"]}", START + b'],"messages":[1]}', False),
        (START + b"]}", START + b'],"mess\\u0061ges":[1]}', False),
        (START + b"]}", START + b'],"messages":null}', False),
        (START + b"]}", START + b'],"messages":7}', False),
        (START + b"]}", START + b'],"other":{"messages":[1]}}', True),
        (START + b"]}", START + b',{"messages":[1]}]}', True),
        (START + b'],"messages":[2]}', START + b'],"messages":[2,3]}', True),
        (START + b'],"messages":[2]}', START + b',3],"messages":[2,3]}', False),
        (b'{"messages":[1]}', b'{"messages":[12]}', False),
        (b'{"messages":[1]}', b'{"messages":[1,2]}', True),
        (b'{"x":[1],"messages":[1]}', b'{"x":[1],"messages":[1,2]}', True),
        (b'{"messages":["a"]}', b'{"messages":["a" "b"]}', False),
        (b'{"messages":[]}', b'{"messages":[1]}', False),
        (b'{"messages":{}}', b'{"messages":{"a":1}}', False),
        (b'{"input":[1]}', b'{"input":[1,2]}', False),
        (b'{"a":1,"messages":[1]}', b'{"a":1,"messages":[1,\xff]}', False),
        (b'{"messages":[1]}', b'{"messages":[1,1e999]}', False),
    ],
)
def test_any_continuation_is_read_like_a_full_parse(first: bytes, second: bytes, repeats: bool) -> None:
    for kind in (bytes, bytearray):
        reader = Reader()
        read_alike(reader, kind(first))
        read_alike(reader, kind(second))
        assert reader.repeated == repeats


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "messages"]), inner, max_size=2)
    ),
    max_leaves=5,
)
_EDITS = st.tuples(
    st.floats(0, 1), st.integers(0, 2), st.binary(max_size=2) | st.sampled_from([b",", b"]", b'"', b" "])
)


@given(
    messages=st.lists(_VALUES, min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 8), min_size=2, max_size=5),
    before=st.dictionaries(st.sampled_from(["x", "model"]), _VALUES, max_size=2),
    after=st.dictionaries(st.sampled_from(["y", "tools"]), _VALUES, max_size=2),
    indent=st.sampled_from([None, 1]),
    edits=st.lists(st.none() | _EDITS, min_size=5, max_size=5),
)
def test_any_bodies_are_read_like_a_full_parse(
    messages: list[Any], cuts: list[int], before: Any, after: Any, indent: int | None, edits: list[Any]
) -> None:
    reader = Reader()
    for cut, edit in zip(cuts, edits, strict=False):
        body = json.dumps({**before, "messages": messages[:cut], **after}, indent=indent).encode()
        if edit is not None:
            place, removed, added = edit
            at = int(place * len(body))
            body = body[:at] + added + body[at + removed :]
        read_alike(reader, body)


def test_a_body_too_long_to_scan_is_not_remembered_unless_it_extends_one() -> None:
    reader = Reader()
    long = "x" * MAX_SCAN
    read_alike(reader, body_of(long))
    read_alike(reader, body_of(long, "a"))
    assert reader.repeated == 0
    read_alike(reader, body_of("a"))
    for texts in (("a", long), ("a", long, "b")):
        read_alike(reader, body_of(*texts))
    assert reader.repeated == 2


def test_levels_of_nesting_are_counted_in_what_is_new() -> None:
    reader = Reader()
    reader.read(b'{"messages":[1]}')
    deep = b'{"messages":[1,' + b"[" * 130 + b"]" * 130 + b"]}"
    read_alike(reader, deep)
    read_alike(reader, b'{"messages":[1,' + b"[" * 20 + b"]" * 20 + b"]}")
    assert reader.repeated == 1
