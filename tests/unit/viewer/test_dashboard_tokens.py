"""Which tokens were trained on, as in the trainer, and the text of each, as in the tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizer import make_model_dir
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn, trees
from tidegate.sequences import path_to
from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.records.trajectories import encode_trajectory
from tidegate.types import Trajectory
from tidegate.viewer.dashboard.episode import EpisodeTree, likeliest, reasons, tokens, versions
from tidegate.viewer.dashboard.tokens import Pieces, Texts, in_pieces, load


def as_read(trajectory: Trajectory) -> dict[str, Any]:
    """Its record as the dashboard reads it from the file."""
    record: dict[str, Any] = orjson.loads(
        orjson.dumps(encode_trajectory(trajectory), option=orjson.OPT_SERIALIZE_NUMPY)
    )
    return record


def trained_by(tree: EpisodeTree, number: int) -> list[int]:
    """The ids that sequence `number` trains, as the page says."""
    sequence = tree.sequences()[number]
    found = []
    for index in sequence.turns:
        words = [word for word, count in reasons(tree.turn(index), "stepped") for _ in range(count)]
        ids = tree.turn(index)["output_ids"]
        found += [
            one for one, word in zip(ids, words, strict=True) if word == "trained" and index in sequence.own
        ]
    return found


@settings(max_examples=60, deadline=None)
@given(trees())
def test_what_is_called_trained_is_what_the_trainer_trains(trajectory: Trajectory) -> None:
    rows = rows_of(trajectory, 0.5)
    tree = EpisodeTree(as_read(trajectory))
    sequences = tree.sequences()
    assert len(sequences) == len(rows)
    for number, row in enumerate(rows):
        path = [one for index in sequences[number].turns for part in ("delta_ids", "output_ids")
                for one in tree.turn(index)[part]]  # fmt: skip
        assert path == row.ids.tolist()
        assert trained_by(tree, number) == row.ids[row.mask].tolist()


def test_each_token_has_the_reason_why_it_was_not_trained_on() -> None:
    turn = as_read(make_trajectory([make_turn(0, None, [1], [2, 3, 4], forced=(1,))]))["turns"][0]
    assert reasons(turn, "stepped") == [("trained", 1), ("grammar", 1), ("trained", 1)]
    assert reasons(turn, "trained") == reasons(turn, "stepped")
    assert reasons(turn, "stale") == [("stale", 1), ("grammar", 1), ("stale", 1)]
    for state in ("filtered", "failed", "cancelled", "abandoned", "eval"):
        assert reasons(turn, state)[0] == (state, 1)
    assert reasons({**turn, "delivered": False}, "stepped") == [("undelivered", 3)]


def test_versions_are_those_that_the_engine_reported() -> None:
    turn: dict[str, Any] = {"version_spans": [[3, 0, 2], [4, 2, 3]]}
    assert versions(turn, 0, 5) == [3, 3, 4, None, None]
    assert versions(turn, 2, 4) == [4, None]


def test_damaged_turns_do_no_harm() -> None:
    circle = {"turns": [{"index": 0, "parent": 1, "output_ids": [1]}, {"index": 1, "parent": 0}, 5, {}]}
    tree = EpisodeTree(circle)
    assert path_to(1, tree.parents) == [0, 1]
    assert tree.sequences() == [([0], {0})]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_the_pieces_are_the_text(model: Path, text: str) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    decode, _ = load(model)
    pieces, parts = in_pieces(decode, ids, 0)
    assert "".join(pieces) == decode(ids)
    assert len(pieces) == len(ids)
    assert all(pieces[place] == "" for place in parts)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=24))
def test_any_ids_can_be_shown(model: Path, ids: list[int]) -> None:
    decode, _ = load(model)
    pieces, _ = in_pieces(decode, ids, 0)
    assert len(pieces) == len(ids)


def test_a_character_stands_at_the_token_that_completes_it(model: Path) -> None:
    decode, _ = load(model)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode("a🙂b").ids
    assert in_pieces(decode, ids, 0) == (["a", "", "", "", "🙂", "b"], [1, 2, 3])


def test_a_leading_space_is_kept() -> None:
    words = ["▁Hello", "▁world", "!"]

    def decode(ids: list[int]) -> str:  # as tokenizers of the SentencePiece family do
        return "".join(words[one] for one in ids).replace("▁", " ").removeprefix(" ")

    assert in_pieces(decode, [0, 1, 2], 0)[0] == ["Hello", " world", "!"]
    assert in_pieces(decode, [0, 1, 2], 1)[0] == [" world", "!"]


def test_tokens_come_in_pages_that_fit_together(model: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode("one 🙂 two 水 three").ids
    record = as_read(make_trajectory([make_turn(0, None, [5], ids)]))
    texts = Texts(model.parent / "nowhere", str(model))
    whole = tokens(EpisodeTree(record), 0, "sampled", texts, 0, 1000)
    pages = [tokens(EpisodeTree(record), 0, "sampled", texts, start, 5) for start in range(0, len(ids), 5)]
    for name in ("ids", "logprobs", "versions"):
        assert [one for page in pages for one in page[name]] == whole[name]
    assert "".join(whole["texts"]).endswith("one 🙂 two 水 three")
    assert all(page["total"] == len(ids) for page in pages)


def test_the_likeliest_ids_of_the_engine_are_shown_with_their_texts(model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids, others = tokenizer.encode("one two").ids, tokenizer.encode("xyz").ids
    turn = make_turn(0, None, [5], ids)
    top = np.array([[token, *others[:1], *range(6)] for token in ids], dtype=np.int32)
    turn.top_ids, turn.top_logprobs = top.reshape(-1), np.linspace(0, -9, top.size).astype(np.float16)
    tree, texts = EpisodeTree(as_read(make_trajectory([turn]))), Texts(model.parent / "nowhere", str(model))
    whole = tokens(tree, 0, "sampled", texts, 0, 1000)
    assert [len(row) for row in whole["likeliest"]] == [5] * len(ids)
    assert [row[0][0] for row in whole["likeliest"]] == whole["texts"]
    assert {row[1][0] for row in whole["likeliest"]} == {"x"}
    assert [row[1][1] for row in whole["likeliest"]] == turn.top_logprobs[1::8].tolist()
    assert tokens(tree, 0, "sampled", texts, 2, 3)["likeliest"] == whole["likeliest"][2:5]
    bare = tokens(tree, 0, "sampled", Texts(model.parent / "nowhere", None), 0, 1)
    assert bare["likeliest"][0][0][0] == str(ids[0])
    told = [(row[0], [5, *ids][place : place + 1]) for place, row in enumerate(top.tolist())]
    echo = SimpleNamespace(pieces=lambda ids, before: Pieces([str((ids[0], before))], [], []))
    assert [row[0][0] for row in likeliest(tree.turn(0), 2, 5, echo) or []] == [str(one) for one in told[2:5]]
    for damaged in ({}, {"top_ids": "?", "top_logprobs": "AAAA"}, {"top_ids": 1, "top_logprobs": None}):
        record = {"turns": [{"index": 0, "parent": None, "output_ids": ids, **damaged}]}
        assert tokens(EpisodeTree(record), 0, "sampled", texts, 0, 9)["likeliest"] is None


def test_special_tokens_are_marked(model: Path) -> None:
    texts = Texts(model.parent / "nowhere", str(model))
    found = texts.pieces([1, 40, 2])
    assert found is not None
    assert found.texts[0] == "<|im_start|>"
    assert found.special == [0, 2]


def test_without_a_tokenizer_ids_are_shown_with_the_reason(tmp_path: Path) -> None:
    texts = Texts(tmp_path, str(tmp_path / "gone"))
    assert texts.pieces([1, 2]) is None
    assert texts.problem is not None
    assert "gone does not exist" in texts.problem
    record = as_read(make_trajectory([make_turn(0, None, [1], [2, 3])]))
    assert tokens(EpisodeTree(record), 0, "sampled", texts, 0, 10)["texts"] is None


def test_a_broken_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    texts = Texts(tmp_path, str(tmp_path / "model"))
    assert texts.pieces([1]) is None
    assert "model" in (texts.problem or "")


def test_the_newest_checkpoint_has_the_tokenizer(tmp_path: Path) -> None:
    texts = Texts(tmp_path, None)
    assert texts.pieces([40]) is None
    make_model_dir(tmp_path / "checkpoints" / "step_1")
    (tmp_path / "checkpoints" / "step_1" / "COMMITTED").write_text("{}")
    assert texts.pieces([40]) is not None
    assert texts.problem is None
