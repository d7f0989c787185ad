"""Words of the retrieval index in scripts with combining marks, and in several spellings of one text."""

from __future__ import annotations

import unicodedata

import pytest

from tests.rag_corpus import write_jsonl
from tests.unit.rag.test_index import build_quietly
from tidegate.rag.build import Plan
from tidegate.rag.encoders import words
from tidegate.rag.index.searcher import Searcher

DOCUMENTS = {
    "hindi": "हिन्दी भारत की राजभाषा", "milk": "दूध नदी कमल", "water": "मानक किताब और पानी",
    "cafe": "le café de Zürich", "plain": "the cafe is open", "tamil": "தமிழ் மொழி", "tamil2": "மழை தண்ணீர்",
    "thai": "น้ำ", "thai2": "นา", "persian": "می‌خواهم", "arabic": "مُحَمَّد", "hebrew": "שָׁלוֹם", "bengali": "বাংলা",
    "viet": "tiếng Việt", "kana": "がっこう", "wide": "ＡＢＣ１２３",
    "street": "Hauptstraße", "turkish": "İstanbul",
    "khmer": "ខ្មែរ", "greek": "ΟΔΟΣ", "korean": "한국어",
}  # fmt: skip
QUERIES = [
    ("हिन्दी", "hindi"), ("पानी", "water"), ("தமிழ்", "tamil"), ("น้ำ", "thai"), ("میخواهم", "persian"),
    ("مُحَمَّد", "arabic"), ("שָׁלוֹם", "hebrew"), ("বাংলা", "bengali"), ("VIỆT", "viet"), ("ABC123", "wide"),
    ("HAUPTSTRASSE", "street"), ("i̇stanbul", "turkish"), ("ខ្មែរ", "khmer"), ("οδος", "greek"),
    ("한국어", "korean"),
    ("Zürich café", "cafe"),
]  # fmt: skip


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    place = tmp_path_factory.mktemp("words")
    rows = [{"id": id, "text": text} for id, text in DOCUMENTS.items()]
    build_quietly(Plan([write_jsonl(place / "c.jsonl", rows)], place / "i", "hash", bm25=True))
    return Searcher(place / "i", threads=1)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(("query", "document"), QUERIES)
def test_a_word_is_found_in_each_spelling(searcher: Searcher, query: str, document: str, form: str) -> None:
    """scikit-learn/scikit-learn#30935, RasaHQ/rasa#5998, DeytaHQ/khora#1388, vshulcz/deja-vu#1098."""
    text = unicodedata.normalize(form, query)  # type: ignore[arg-type]
    assert [row.id for row in searcher.search([text], [5], "bm25")[0]] == [document]
    assert searcher.search([text], [1], "dense")[0][0].id == document


def test_words_are_neither_cut_nor_joined() -> None:
    """scikit-learn/scikit-learn#30935; the siblings that must stay."""
    assert words("हिन्दी भारत") == ["हिन्दी", "भारत"]
    assert words("Tide-gate 7 東京タワー ÜBER") == ["tide", "gate", "7", *"東京タワー", "über"]
    assert words("soft\u00adhyphen, ﬁne") == ["softhyphen", "fine"]
    assert words("ﾀﾜｰ") == words("タワー")
