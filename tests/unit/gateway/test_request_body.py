"""The limit on the values of a large request body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.gateway.errors import ApiError
from tidegate.gateway.turns.request_reader import parse_large

texts = st.text(alphabet='a",[{\\é\n', max_size=12)
values = st.recursive(
    texts | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def separators(value: Any) -> int:
    """The brackets that open, and the commas."""
    if not isinstance(value, (list, dict)):
        return 0
    items = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(items)) + sum(map(separators, items))


@settings(max_examples=50)
@given(st.dictionaries(texts, values, max_size=3), st.booleans())
def test_what_texts_hold_does_not_count_as_values(value: dict[str, Any], ascii: bool) -> None:
    body, number = json.dumps(value, ensure_ascii=ascii).encode(), separators(value)
    assert parse_large(body, number) == value
    with pytest.raises(ApiError, match=f"more than {number - 1} values"):
        parse_large(body, number - 1)
