"""Prepares BrowseComp-Plus: `prepare.py QUESTIONS CORPUS OUT`.

QUESTIONS and CORPUS are the directories of the published parquet files. Writes OUT/train.jsonl and
OUT/test.jsonl, with texts still encrypted as published, and OUT/corpus.jsonl for `tidegate rag build`. The
test set is a fifth of the questions, chosen by a hash of their id.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow import parquet

TEST_SHARE = 5
COLUMNS = ("query_id", "query", "answer")
# Many documents begin with front matter that contains their title.
_TITLE = re.compile(r"\A---\n(?:.*\n)*?title:[ \t]*(?P<title>.+)\n")


def rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Rows of a directory's parquet files, read one batch at a time."""
    files = sorted(directory.rglob("*.parquet"))
    if not files:
        raise SystemExit(f"{directory} holds no .parquet file")
    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=64):
            yield from batch.to_pylist()


def question(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a question that training needs, including the encrypted ids of its gold documents."""
    gold = [{"docid": document["docid"]} for document in row.get("gold_docs") or []]
    return {**{key: row[key] for key in COLUMNS}, "gold_docs": gold}


def is_test(query_id: Any) -> bool:
    digest = hashlib.blake2b(str(query_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % TEST_SHARE == 0


def document(row: dict[str, Any]) -> dict[str, str]:
    found = _TITLE.match(row["text"][:4096])
    return {"id": str(row["docid"]), "title": found["title"].strip() if found else "", "text": row["text"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("questions", "corpus", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "test": 0, "corpus": 0}
    with (arguments.out / "train.jsonl").open("w") as train, (arguments.out / "test.jsonl").open("w") as test:
        for row in rows(arguments.questions):
            split, file = ("test", test) if is_test(row["query_id"]) else ("train", train)
            counts[split] += 1
            file.write(json.dumps(question(row)) + "\n")
    with (arguments.out / "corpus.jsonl").open("w") as corpus:
        for row in rows(arguments.corpus):
            counts["corpus"] += 1
            corpus.write(json.dumps(document(row)) + "\n")
    print(", ".join(f"{name}: {count:,}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
