"""Dead letters: quarantined tasks with their messages and failed attempts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tidegate import failpoints
from tidegate.trainer.ledger.jsonl import drop_torn_line, naming
from tidegate.types import Outcome, Task


@dataclass(frozen=True, slots=True)
class Attempted:
    """One attempt of the slot whose budget is exhausted."""

    attempt: str
    outcome: Outcome
    why: str | None


class DeadLetters:
    """Appends a line per quarantined task to `dead_letters.jsonl`.

    The line is written before the ledger entry of the quarantine. After a crash between the two the task is
    attempted again and may be in the file twice.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "dead_letters.jsonl"
        drop_torn_line(self.path)

    def write(self, task: Task, group: str, slot: int, attempts: Sequence[Attempted]) -> None:
        line = {
            "time": round(time.time(), 3), "task": task.id, "env": task.env, "messages": list(task.messages),
            "group": group, "slot": slot, "attempts": [asdict(attempt) for attempt in attempts],
        }  # fmt: skip
        # A task may have values without a JSON form, or text that is not valid Unicode.
        encoded = json.dumps(line, default=str, ensure_ascii=False).encode("utf-8", "replace")
        with failpoints.around("dead_letters"), naming(self.path), open(self.path, "ab") as file:
            file.write(encoded + b"\n")
