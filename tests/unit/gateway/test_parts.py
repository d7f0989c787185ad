"""Hermes tool calls: calls and content are the same however the text is divided into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.gateway.parsing.parts import Part, PlainParser, SampledCall
from tidegate.gateway.parsing.tool_calls.json_formats import HERMES


def read(*pieces: str) -> tuple[str, list[SampledCall], str | None]:
    parser = HERMES.parser(())
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [part for part in parts if isinstance(part, SampledCall)], parser.status


def block(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_call_after_some_text() -> None:
    content, calls, status = read("Let me see.\n" + block("calculator", {"expression": "1+2"}))
    assert content == "Let me see."
    assert calls == [SampledCall("calculator", '{"expression":"1+2"}')]
    assert status == "ok"


def test_several_calls_and_text_between_them() -> None:
    content, calls, status = read(block("f", {}) + "\n" + block("g", {"x": [1]}) + " done ")
    assert [call.name for call in calls] == ["f", "g"]
    assert content.strip() == "done"
    assert status == "ok"


@pytest.mark.parametrize(
    "inner",
    [
        "not json",
        '{"name": "f", "arguments": {"x": 1}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "not json"}',
        "[]",
        "",
    ],
)
def test_a_malformed_call_stays_content(inner: str) -> None:
    text = f"a <tool_call>{inner}</tool_call> b"
    assert read(text) == (text, [], "malformed")


def test_a_call_that_is_never_closed_stays_content() -> None:
    text = 'a\n<tool_call>\n{"name": "f", "arguments": {}}'
    assert read(text) == (text, [], "malformed")


def test_a_good_call_survives_a_malformed_one() -> None:
    content, calls, status = read("<tool_call>oops</tool_call>" + block("f", {}))
    assert content == "<tool_call>oops</tool_call>"
    assert calls == [SampledCall("f", "{}")]
    assert status == "malformed"


def test_arguments_given_as_json_text_or_left_out() -> None:
    _, calls, _ = read(block("f", '{"x": 1}') + '<tool_call>{"name": "g"}</tool_call>')
    assert calls == [SampledCall("f", '{"x":1}'), SampledCall("g", "{}")]


def test_plain_text_is_left_as_it_is() -> None:
    for text in ("", " a \n", "a < b", "<tool", "1 <tool_cal"):
        assert read(text) == (text, [], None)
    parser = PlainParser()
    assert [*parser.feed(block("f", {})), *parser.finish()] == [block("f", {})]
    assert parser.status is None


PIECES = st.lists(
    st.one_of(
        st.text("ab<>/_tolc \n{}\"'", max_size=6),
        st.sampled_from(["<tool_call>", "</tool_call>", block("f", {"x": 1}), "\n", "#### 4"]),
    ),
    max_size=8,
)


@given(PIECES, st.data())
def test_the_pieces_do_not_matter(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    assert read(*(text[a:b] for a, b in itertools.pairwise(edges))) == read(text)


@given(PIECES)
def test_nothing_is_lost(pieces: list[str]) -> None:
    """Put the calls back as text: but for whitespace it is what the model wrote."""
    text = "".join(pieces)
    parser = HERMES.parser(())
    parts = [*parser.feed(text), *parser.finish()]
    again = "".join(part if isinstance(part, str) else block("f", {"x": 1}) for part in parts)
    assert "".join(again.split()) == "".join(text.split())
