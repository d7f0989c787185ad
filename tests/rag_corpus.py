"""Small corpora and their indexes, for tests."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tidegate.progress import Progress
from tidegate.rag.build import Plan, build
from tidegate.rag.index.manifest import Manifest

PLACES = ("harbour", "bridge", "market", "library", "tower", "garden", "station", "museum")
TRADES = ("mayor", "baker", "pilot", "judge", "painter", "doctor", "teacher")


def passages(count: int) -> list[dict[str, Any]]:
    """`count` documents with distinct names."""
    return [
        {
            "id": f"p{number}",
            "title": f"Person{number}",
            "text": f"Person{number} is the {TRADES[number % 7]} of Town{number // 5} and lives near the"
            f" {PLACES[number % 8]}.",
        }
        for number in range(count)
    ]


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def build_quietly(plan: Plan) -> tuple[Manifest, str]:
    """Builds an index; returns the manifest and the output of the build."""
    said = io.StringIO()
    return build(plan, Progress(said)), said.getvalue()
