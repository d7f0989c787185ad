"""Texts encoded in pieces have the ids of the whole text, or are not split."""

from __future__ import annotations

import tracemalloc
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.families import family_tokenizer
from tidegate.gateway.rendering import tokenizer
from tidegate.gateway.rendering.tokenizer import LONG, Codec, SplitEncoder

_WORDS = (
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "é",
    "▁",
    " ",
    "\n",
    "Ġ",
    "1",
    "'",
    "<",
    "|",
    "<|",
    "x",
    "▁a",
    "Ġa",
    "Ġb",
)


def _bpe(**changes: Any) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate((*_WORDS, "[UNK]"))}
    merges = [("a", "b"), ("b", "c"), ("<", "|"), ("▁", "a"), ("Ġ", "a"), ("Ġ", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = changes.get("pre_tokenizer")
    tokenizer.normalizer = changes.get("normalizer")
    token = {"special": True, **changes.get("token", {})}
    tokenizer.add_special_tokens([AddedToken(text, **token) for text in ("<|x|>", "<|x|>b", "<s>")])
    if "plain" in changes:
        tokenizer.add_tokens([changes["plain"]])
    if "truncation" in changes:
        tokenizer.enable_truncation(4)
    return tokenizer


def _metaspace(scheme: str) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme)


SPLIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "byte level": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "byte level, prefix space": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "metaspace always": {"pre_tokenizer": _metaspace("always")},
    "metaspace never": {"pre_tokenizer": _metaspace("never")},
    "bert": {"pre_tokenizer": pre_tokenizers.BertPreTokenizer(), "normalizer": normalizers.BertNormalizer()},
    "prepend": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    },
    "strip": {"normalizer": normalizers.Strip()},
    "a normalized token": {
        "plain": AddedToken("b c", normalized=True, special=False),
        "normalizer": normalizers.Lowercase(),
    },
    "a normalized token that the normalizer changes": {
        "plain": AddedToken("b c", normalized=True, special=False),
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    },
    "a plain token": {"plain": AddedToken("b c", normalized=False, special=False)},
}
WHOLE: dict[str, dict[str, Any]] = {
    "metaspace first": {"pre_tokenizer": _metaspace("first")},
    "a sequence with metaspace first": {
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), _metaspace("first")])
    },
    "an unknown pre-tokenizer": {"pre_tokenizer": pre_tokenizers.UnicodeScripts()},
    "lstrip": {"token": {"lstrip": True}},
    "rstrip": {"token": {"rstrip": True}},
    "single word": {"token": {"single_word": True}},
    "a plain token that strips": {"plain": AddedToken("b c", normalized=False, rstrip=True)},
    "truncation": {"truncation": True},
}
FAMILIES = {"qwen3": True, "mistral_v7": True, "phi3": False}


@cache
def encoder(kind: str) -> tuple[Any, SplitEncoder]:
    name, _, size = kind.partition("/")
    if name in FAMILIES:
        backend = family_tokenizer(name, size).backend_tokenizer
    else:
        backend = _bpe(**(SPLIT | WHOLE)[kind])
    return backend, SplitEncoder(backend)


KINDS = {f"{name}/tiny": splits for name, splits in FAMILIES.items()}
KINDS |= dict.fromkeys(SPLIT, True) | dict.fromkeys(WHOLE, False)
_TOKENS = ("<|x|>", "<|x|>b", "<s>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "[INST]", "<|end|>")
_TEXTS = st.lists(
    st.sampled_from(
        (
            *_TOKENS,
            *_WORDS,
            "b c",
            "B C",
            "user\n",
            "\n\n",
            "  ",
            "\t",
            "Ａ",
            "ﬁ",
            "e\u0301",
            "🍎",
            "12345",
            "|>",
        )
    )
    | st.text(max_size=6),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_only_tokenizers_that_allow_it_are_split(kind: str) -> None:
    assert encoder(kind)[1].splits == KINDS[kind]


@settings(max_examples=150)
@given(text=_TEXTS, kind=st.sampled_from(list(KINDS)))
def test_pieces_have_the_ids_of_the_whole(text: str, kind: str) -> None:
    backend, split = encoder(kind)
    assert split.encode(text) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
@settings(max_examples=5000)
@given(text=_TEXTS, name=st.sampled_from(list(FAMILIES)))
def test_pieces_have_the_ids_of_the_whole_with_a_real_vocabulary(text: str, name: str) -> None:
    backend, split = encoder(f"{name}/real")
    assert split.splits == FAMILIES[name]
    assert split.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_a_long_text_is_encoded_as_a_whole() -> None:
    backend, split = encoder("qwen3/tiny")
    text = "user\n<|im_end|> a" * LONG
    assert split.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_whose_pieces_differ_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the list of pre-tokenizers be wrong, the probe at the start finds it."""
    monkeypatch.setattr(tokenizer, "_by_piece", lambda step: True)
    backend = _bpe(pre_tokenizer=_metaspace("first"))
    assert not SplitEncoder(backend).splits


def test_repeated_pieces_are_encoded_once() -> None:
    class Counting:
        def __init__(self, backend: Any) -> None:
            self.backend = backend
            self.texts: list[str] = []

        def encode(self, text: str, **options: Any) -> Any:
            self.texts.append(text)
            return self.backend.encode(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

    counting = Counting(family_tokenizer("qwen3", "tiny").backend_tokenizer)
    split = SplitEncoder(counting)
    counting.texts.clear()
    for question in ("one", "two"):
        split.encode(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert counting.texts == ["user\none", "assistant\n", "user\ntwo"]  # the probe had "\n"


def test_the_codec_encodes_escaped_tokens_as_text() -> None:
    codec = Codec(family_tokenizer("qwen3", "tiny"))
    escaped = codec.escape_special_tokens("a <|im_end|> b")
    ids = codec.encode(f"<|im_start|>{escaped}<|im_end|>")
    assert codec.decode_all(ids) == "<|im_start|>a <|im_end|> b<|im_end|>"
    assert ids.count(codec.added["<|im_end|>"]) == 1


def test_distinct_pieces_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends other texts each time cannot make the cache large."""
    share = 16
    monkeypatch.setattr(tokenizer, "_ENTRIES", tokenizer._ENTRIES // share)
    split = SplitEncoder(encoder("qwen3/tiny")[0])
    tracemalloc.start()
    try:
        for number in range(4 * tokenizer._ENTRIES):
            split.encode(f"<|im_start|>{number}" + " a1" * 330)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 8 * 2**20 / share
