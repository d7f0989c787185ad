"""Dead letters: the tasks that were given up, what they asked, and why every attempt at them failed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate import failpoints
from tidegate.trainer.ledger.jsonl import drop_torn_line
from tidegate.types import Outcome, Task


@dataclass(frozen=True, slots=True)
class Attempted:
    """One attempt of the slot that ran out of them."""

    attempt: str
    outcome: Outcome
    why: str | None


class DeadLetters:
    """Appends a line a quarantined task to `dead_letters.jsonl`.

    It is written before the ledger has the quarantine: after a crash between the two the task is attempted
    again, and may be in the file twice.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "dead_letters.jsonl"
        drop_torn_line(self.path)

    def write(self, task: Task, group: str, slot: int, attempts: Sequence[Attempted]) -> None:
        line = {
            "time": round(time.time(), 3), "task": task.id, "env": task.env, "messages": list(task.messages),
            "group": group, "slot": slot, "attempts": [asdict(one) for one in attempts],
        }  # fmt: skip
        with failpoints.around("dead_letters"), open(self.path, "ab") as file:
            file.write(_encoded(line) + b"\n")


def _encoded(line: Mapping[str, Any]) -> bytes:
    """Whatever a task is made of: one that no message could carry is what is given up first."""
    return json.dumps(line, default=str, ensure_ascii=False).encode("utf-8", "replace")
