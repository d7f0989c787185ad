"""Every file of a small run, and every field of its lines, is in docs/formats.md or docs/metrics.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site.fields import with_fields
from tests import REPO
from tests.e2e.runs import TrainProcess

PAGE = with_fields((REPO / "docs" / "formats.md").read_text(encoding="utf-8"))
MODEL = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
"""Files in Hugging Face format that the page calls the tokenizer's."""


def lines(path: Path) -> Iterator[dict[str, object]]:
    return map(json.loads, path.read_text().splitlines())


def documented(name: str) -> bool:
    return f"`{name}`" in PAGE


@pytest.mark.slow
def test_each_file_and_field_of_a_run_is_documented(tmp_path: Path) -> None:
    run = tmp_path / "small"
    process = TrainProcess(run, ["--trainer.steps=2", "--eval.every=2"])
    assert process.wait() == 0, process.output()[-3000:]

    names = {re.sub(r"\d{2,}|(?<=step_)\d", "N", str(one.relative_to(run))) for one in files(run)}
    known = {name for name in names if any(documented(part) for part in shown(name))}
    assert sorted(names - known) == []
    found = set()
    for path in [*run.glob("trajectories/*.jsonl"), run / "ledger.jsonl"]:
        for line in lines(path):
            found |= line.keys()
            for part in ("turns", "tool_calls"):
                found |= {key for one in line.get(part, ()) for key in one}  # type: ignore[attr-defined]
    for marker in run.glob("checkpoints/step_*/COMMITTED"):
        found |= json.loads(marker.read_text()).keys()
    for line in lines(run / "load.jsonl") if (run / "load.jsonl").exists() else ():
        found |= line.keys()
        found |= {key for one in line["processes"].values() for key in one}  # type: ignore[attr-defined]
    assert {"output_ids", "event", "cursor"} <= found
    assert sorted(name for name in found if not documented(name)) == []


def files(run: Path) -> list[Path]:
    return [one for one in run.rglob("*") if one.is_file() and one.name not in MODEL]


def shown(name: str) -> list[str]:
    """The ways in which the page may name a file: its path, its name, or the pattern of its folder."""
    path = Path(name)
    folder = path.parts[0]
    by_step = {"step_N.jsonl": "trajectories/step_000040.jsonl", "eval_N.jsonl": "eval_000040.jsonl"}
    of_process = f"{folder}/NAME{path.suffix}" if folder == "logs" else name
    return [name, path.name, by_step.get(path.name, name), of_process, of_process.replace("NAME", "*")]
