"""Rows of parquet files: texts without their type, and keys that the rows of a nested column share."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tidegate.envs.base import load_environment
from tidegate.envs.datasets.dataset import Dataset
from tidegate.envs.datasets.rows import read_rows
from tidegate.errors import ConfigError
from tidegate.rag.corpus.source import read_rows as read_documents

TYPES = [
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int32(), pa.binary()),
    pa.string(),
]
QUESTION, LATIN = "What is 1 + 1? é", "é".encode("latin-1")


def written(tmp_path: Path, **columns: Any) -> str:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("prompt", ["question", "{question}"])
def test_bytes_are_texts(tmp_path: Path, kind: pa.DataType, prompt: str) -> None:
    """apache/spark#1855, apache/arrow#1830, apache/datafusion#12788."""
    texts = pa.array([QUESTION.encode()] * 2, pa.binary()).cast(kind)
    path = written(
        tmp_path, question=texts, answer=pa.array([b"2", b"2"]), tags=pa.array([[b"a"], [b"b", None]])
    )
    task = Dataset(path, path, prompt=prompt).train_task(0)
    assert task.messages == [{"role": "user", "content": QUESTION}]
    assert task.answer == "2"
    assert task.info["tags"][0] in "ab"
    found = load_environment("search_qa", {"path": path, "eval_path": path}).eval_sets()[""][0]
    assert (found.messages[0]["content"], found.answer) == (QUESTION, ["2"])


def test_bytes_that_are_no_text_are_refused_where_they_are_used(tmp_path: Path) -> None:
    """apache/spark#1855: the siblings in other encodings, and images beside the texts."""
    path = written(tmp_path, question=["1?", "2?"], answer=[LATIN, b"2"], image=[{"bytes": b"\x89PNG"}] * 2)
    with pytest.raises(ConfigError, match=r"row 1: 'answer' has bytes that are not UTF-8: unexpected end"):
        Dataset(path, path, prompt="question")
    task = Dataset(path, path, prompt="question", answer=None).eval_sets()[""][1]
    assert task.info == {"question": "2?", "answer": "2"}
    with pytest.raises(ConfigError, match="'image' has bytes that are not UTF-8: invalid start byte"):
        Dataset(path, path, prompt="image", answer=None)


def test_documents_of_a_corpus_may_be_bytes(tmp_path: Path) -> None:
    """apache/arrow#1830: the sibling in the corpus of the retrieval server."""
    path = Path(written(tmp_path, id=[b"d1", b"d2"], text=["é".encode(), LATIN]))
    good, bad = read_documents([path])
    assert (good.document().id, good.document().text) == ("d1", "é")
    with pytest.raises(ValueError, match="'text' has bytes that are not UTF-8"):
        bad.document()


def test_a_tool_call_has_its_own_arguments_only(tmp_path: Path) -> None:
    """huggingface/trl#5376, axolotl-ai-cloud/axolotl#2909: a nested column has the keys of all rows."""
    calls = [{"city": "Rome"}, {"path": "a", "mode": {"append": False}}]
    chats = [
        [
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            },
            {"role": "tool", "content": "ok", "tool_call_id": "1"},
        ]
        for arguments in calls
    ]
    tools = [
        [{"function": {"name": "f", "parameters": {key: {"type": "string"} for key in call}}}]
        for call in calls
    ]
    path = written(tmp_path, messages=chats, tools=tools, answer=["1", "2"], note=[None, "x"])
    tasks = Dataset(path, path, prompt="messages").eval_sets()[""]
    assert [task.messages for task in tasks] == chats
    assert [task.info["tools"] for task in tasks] == tools
    assert tasks[0].info["note"] is None, "a column is not nested"


def test_a_map_is_an_object(tmp_path: Path) -> None:
    """axolotl-ai-cloud/axolotl#2909: the sibling type."""
    maps = pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    assert [row["m"] for row in read_rows(Path(written(tmp_path, m=maps)))] == [{"a": 1}, {"b": 2}]


def test_an_infinite_number_is_refused_where_it_is_used(tmp_path: Path) -> None:
    """NaN marks a missing value; Infinity became one, too."""
    path = written(tmp_path, question=["1?", "2?"], answer=[math.inf, 2.0], top=[{"s": [-math.inf]}] * 2)
    with pytest.raises(ConfigError, match="row 1: 'answer' has inf, which is not a JSON number"):
        Dataset(path, path, prompt="question")
    tasks = Dataset(path, path, prompt="question", skip_invalid=True).eval_sets()[""]
    assert [(task.answer, task.info) for task in tasks] == [(2.0, {"question": "2?"})]
    missing = written(tmp_path, score=[math.nan])
    assert [row["score"] for row in read_rows(Path(missing))] == [None]


@pytest.mark.skipif(find_spec("pandas") is not None, reason="with pandas, pyarrow reads them")
def test_a_time_that_pyarrow_cannot_read_is_a_mistake_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, question=["1?"], at=pa.array([1], pa.timestamp("ns")))
    with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read as parquet: Nanosecond.*pandas"):
        Dataset(path, path, prompt="question")
