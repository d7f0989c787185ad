"""Reasoning and answer are separated, however the text is divided into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.parsing.reply import (
    Part,
    PlainParser,
    Reasoning,
    ReasoningParser,
    ReplyReader,
    SampledCall,
)
from tidegate.gateway.parsing.tool_calls.json_formats import HERMES
from tidegate.gateway.rendering.renderer import Renderer

RENDERER = Renderer(make_tokenizer("qwen2"))
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(*pieces: str, begun: bool = False) -> tuple[str, str, int]:
    """Reasoning, content and how many calls."""
    parser = ReasoningParser(HERMES.parser(()), begun)
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part for part in parts if isinstance(part, str))
    return thought, content, sum(isinstance(part, SampledCall) for part in parts)


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nhm\n</think>\n\nSo. ", False, ("hm", "So. ", 0)),
        (f"\n<think>a b</think>{CALL}", False, ("a b", "", 1)),
        (f"<think>{CALL}</think>ok", False, (CALL, "ok", 0)),
        ("hm\n</think>\nSo.", True, ("hm", "So.", 0)),
        ("<think>hm</think>So.", True, ("hm", "So.", 0)),
        ("never closed ", True, ("never closed", "", 0)),
        ("<think>cut </thin", False, ("cut </thin", "", 0)),
        ("<think></think>So.", False, ("", "So.", 0)),
        (" <thi", False, ("", " <thi", 0)),
        ("no <think>x</think>", False, ("", "no <think>x</think>", 0)),
        ("", True, ("", "", 0)),
        ("  ", False, ("", "  ", 0)),
    ],
)
def test_what_is_reasoning(text: str, begun: bool, expected: tuple[str, str, int]) -> None:
    assert read(text, begun=begun) == expected
    assert read(*text, begun=begun) == expected


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "</th", CALL]), max_size=8)


@given(PIECES, st.booleans(), st.data())
def test_the_pieces_do_not_matter_and_nothing_is_lost(
    pieces: list[str], begun: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    thought, content, calls = read(text, begun=begun)
    assert read(*cut, begun=begun) == (thought, content, calls)
    told = "".join((thought + content).split())
    for marker in ("<think>", "</think>", CALL):
        text, told = (one.replace("".join(marker.split()), "") for one in ("".join(text.split()), told))
    assert told == text


def test_what_the_prompt_ends_with_belongs_to_the_reply() -> None:
    reader = ReplyReader(RENDERER.decode, (), PlainParser(), prefill="It is")
    reader.push(RENDERER.encode(" 3."))
    reader.finish()
    assert reader.message()["content"] == "It is 3."
