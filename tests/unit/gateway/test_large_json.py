"""Large JSON parsed in pieces: the same values and errors as from the library."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.gateway import large_json
from tidegate.gateway.errors import ApiError
from tidegate.gateway.large_json import fold

TEXTS = st.text(st.sampled_from('ab "\\\n\té€🍎\u2028/u{[,'), max_size=60)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-9, 9), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(VALUES, st.booleans(), st.integers(16, 40), st.integers(1, 12))
def test_unfolding_restores_the_folded_value(value: Any, ascii: bool, window: int, long: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "WINDOW", window)
        patch.setattr(large_json, "_LONG", long)
        assert fold(text, 1000).unfold() == orjson.loads(text)
        assert fold(bytearray(text), 1000).unfold() == orjson.loads(text)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=40), st.booleans(), st.integers(16, 20))
def test_what_the_library_refuses_is_refused(noise: bytes, quoted: bool, window: int) -> None:
    text = b'["' + noise + b'"]' if quoted else noise
    try:
        wanted = orjson.loads(text)
    except orjson.JSONDecodeError:
        wanted = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "WINDOW", window)
        patch.setattr(large_json, "_LONG", 4)
        if wanted is None and text.strip(b" \t\r\n") != b"null":
            with pytest.raises(ApiError, match="the body"):
                fold(text, 1000)
        else:
            assert fold(text, 1000).unfold() == wanted


def test_a_long_string_is_read_in_windows_and_weighed_by_its_pieces() -> None:
    text = "é🍎 word\n" * 60_000
    folded = fold(orjson.dumps({"a": "short", "b": text, text[:200]: [text]}), 100)
    assert folded.value["a"] == "short"
    assert len(folded.value["b"]) < 50
    assert folded.weigh(f"1{folded.value['b']}23{folded.value['b']}", len) == 3 + 2 * len(text)
    assert folded.unfold() == {"a": "short", "b": text, text[:200]: [text]}


def test_equal_texts_have_one_placeholder() -> None:
    name = "n" * 200
    folded = fold(orjson.dumps([name, {"name": name}]), 100)
    assert folded.value[0] == folded.value[1]["name"]


def test_too_many_values_are_refused_before_they_are_read() -> None:
    with pytest.raises(ApiError, match="more than 1000 values") as told:
        fold(b"[" + b"[]," * 1000 + b"1]", 1000)
    assert told.value.status == 413
    assert fold(b'["' + b"[]," * 1000 + b'"]', 1000).unfold() == ["[]," * 1000]
