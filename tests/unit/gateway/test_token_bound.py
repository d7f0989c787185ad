"""The lower bound of a prompt's tokens never exceeds their number, over random texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.families import family_tokenizer
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.rendering.token_bound import TokenBound, max_token_length
from tidegate.gateway.rendering.tokenizer import ESCAPE

PIECES = st.sampled_from(
    ["word ", " " * 40, "=" * 60, "\n\n", "é", "e\u0301", "각", "🍎", ESCAPE, "<|im_end|>", "</think>"]
)
TEXTS = st.lists(PIECES, min_size=1, max_size=30).map("".join)


@pytest.fixture(scope="module", params=["tiny", "real"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    tokenizer = family_tokenizer("qwen3", request.param)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # as Qwen's own
    return Renderer(tokenizer)


@pytest.fixture(scope="module")
def bound(renderer: Renderer) -> TokenBound:
    return TokenBound(renderer)


@settings(deadline=None, max_examples=150)
@given(text=TEXTS, role=st.sampled_from(["user", "tool", "assistant", "system"]))
def test_no_prompt_has_fewer_tokens_than_the_bound(
    renderer: Renderer, bound: TokenBound, text: str, role: str
) -> None:
    messages = [{"role": "user", "content": "ask"}, {"role": role, "content": text}]
    assert bound.min_tokens(messages, None) <= len(renderer.encode_prompt(messages, None, {}))
    assert bound.min_tokens([], text) <= len(renderer.encode(text))


def test_long_contents_are_bounded(renderer: Renderer, bound: TokenBound) -> None:
    longest = max_token_length(renderer.codec.tokenizer)
    assert longest is not None
    for role in ("user", "tool"):
        least = bound.min_tokens([{"role": role, "content": "x" * 1_000_000}], None)
        assert least >= 999_999 // longest
    assert bound.min_tokens([{"role": "assistant", "content": "x" * 1_000_000}], None) == 0


def test_a_tokenizer_that_may_drop_characters_has_no_bound(tmp_path: Path) -> None:
    tokenizer = Renderer.load(make_model_dir(tmp_path / "m")).codec.tokenizer
    assert max_token_length(tokenizer) is not None
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    assert max_token_length(tokenizer) is None
    assert TokenBound(Renderer(tokenizer)).min_tokens([{"role": "user", "content": "x" * 10_000}], None) == 0
