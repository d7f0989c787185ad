"""From ids to the client's text: characters are never split, stop strings never included."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.parsing.reply import Detokenizer, PlainParser, ReplyReader, StopCutter
from tidegate.gateway.parsing.tool_calls.json_formats import HERMES
from tidegate.gateway.rendering.renderer import Renderer

TOKENIZER = make_tokenizer("qwen2")
RENDERER = Renderer(TOKENIZER)
VOCABULARY = len(TOKENIZER)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


def pieces(values: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


@given(TEXTS, st.lists(st.integers(0, 60), max_size=10))
def test_streamed_text_is_the_text(text: str, cuts: list[int]) -> None:
    ids = RENDERER.encode(text)
    detokenizer = Detokenizer(RENDERER.decode)
    streamed = [detokenizer.push(piece) for piece in pieces(ids, cuts)]
    assert "".join(streamed) + detokenizer.finish() == text


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_any_ids_stream_to_a_text_without_crashing(ids: list[int]) -> None:
    detokenizer = Detokenizer(RENDERER.decode)
    streamed = "".join(detokenizer.push([one]) for one in ids) + detokenizer.finish()
    assert "<|im_end|>" not in streamed
    # Bytes that are no UTF-8 may be shown as more or fewer replacement characters, nothing else differs.
    assert streamed.replace("\ufffd", "") == RENDERER.decode(ids).replace("\ufffd", "")


def test_bytes_that_are_no_character_are_not_held_back_for_ever() -> None:
    [byte] = [one for one in range(VOCABULARY) if TOKENIZER.convert_ids_to_tokens(one) == "\u0122"]
    detokenizer = Detokenizer(RENDERER.decode)  # \u0122 stands for the byte 0x80 in byte-level tokenizers
    assert "".join(detokenizer.push([byte]) for _ in range(50)).count("\ufffd") > 40


def test_special_tokens_are_hidden_and_markers_are_shown() -> None:
    ids = RENDERER.encode("a<tool_call>b</tool_call><|im_end|>")
    assert RENDERER.decode(ids) == "a<tool_call>b</tool_call>"


@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    cutter = StopCutter(PlainParser())
    cutter.use(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [part for a, b in itertools.pairwise(edges) for part in cutter.feed(text[a:b])]
    shown = "".join(map(str, [*parts, *cutter.finish()]))
    found = [text.find(stop) for stop in stops if stop in text]
    assert (cutter.stopped in stops) == bool(found)
    if not found:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)


def test_a_reply_as_a_message() -> None:
    text = 'So.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    reader = ReplyReader(RENDERER.decode, (), HERMES.parser(()))
    for one in RENDERER.encode(text):
        reader.push([one])
    reader.finish()
    message = reader.message()
    assert message["content"] == "So."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert call["id"].startswith("call_")
    assert reader.status == "ok"


def test_an_empty_reply_has_empty_content() -> None:
    reader = ReplyReader(RENDERER.decode, ("x",), PlainParser())
    reader.push(RENDERER.encode("<|im_end|>"))
    reader.finish()
    assert reader.message() == {"role": "assistant", "content": ""}
