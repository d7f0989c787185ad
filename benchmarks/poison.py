"""Trains the demo with a fifth of its tasks poisoned: 10% always raise, 5% hang, 5% never call the gateway.

The policy must learn, each poisoned task that is issued must be quarantined after exactly `max_attempts`
attempts of a slot, and the ledger must be consistent. With `--stateful` the calculator is a tool of the
environment (`desk.py`), and the agent is `chat`.

    python benchmarks/poison.py [--json] [--steps 60] [--stateful] [--keep DIR]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common import Check, parser_of, place, report
from poisoned_solver import poison_of

from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.ledger import read_ledger
from tidegate.trainer.run import Run
from tidegate.viewer.live import make_view

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo" / "config.toml"
DEADLINE_S = 10


@dataclass
class Book:
    """Ledger entries about poisoned tasks."""

    task_of: dict[str, str] = field(default_factory=dict)
    failures: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(group, slot) → number of failed attempts that were charged to the task."""
    slot_of: dict[str, tuple[str, int]] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    """Task → the group whose slot ran out of attempts."""
    cancelled: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, run_dir: Path) -> Book:
        book = cls()
        for one in read_ledger(run_dir / "ledger.jsonl"):
            if one["event"] == "quarantined":
                book.quarantined[one["task"]] = one["group"]
            elif one["kind"] == "group" and one["event"] == "issued":
                book.task_of[one["id"]] = one["task"]
            elif one["kind"] == "group" and one["state"] == "cancelled":
                book.cancelled.add(one["id"])
            elif one["kind"] == "attempt" and one["event"] == "issued":
                book.slot_of[one["id"]] = (one["group"], one["slot"])
            elif one["kind"] == "attempt" and one["state"] == "failed" and not _spared(one):
                book.failures[book.slot_of[one["id"]]] += 1
        return book

    def figures(self, max_attempts: int) -> dict[str, float]:
        poisoned = {task for task in self.task_of.values() if poison_of(task)}
        ended = {task for group, task in self.task_of.items() if group not in self.cancelled}
        most = {
            group: max(n for (name, _), n in self.failures.items() if name == group)
            for group in self.quarantined.values()
        }
        return {
            **{
                f"tasks_{kind}": float(sum(poison_of(task) == kind for task in poisoned))
                for kind in ("raises", "hangs", "silent")
            },
            "poisoned_not_quarantined": float(len((poisoned & ended) - set(self.quarantined))),
            "quarantined_but_sound": float(len(set(self.quarantined) - poisoned)),
            "quarantined_after_other_than_max_attempts": float(sum(n != max_attempts for n in most.values())),
            "slots_over_max_attempts": float(sum(n > max_attempts for n in self.failures.values())),
        }


def _spared(line: dict[str, object]) -> bool:
    """Whether a failure was an outage's or a slow engine's."""
    return bool(line.get("spared") or line.get("slow"))


def train(settings: Settings) -> dict[str, float]:
    view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
    began = time.monotonic()
    environment = load_environment(settings.env.use, settings.env.options)
    result = asyncio.run(Run(settings, environment, view).train())
    return {
        "before": result.initial_eval["eval/reward"],
        "after": result.final_eval["eval/reward"],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stateful", action="store_true", help="the calculator is the environment's")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the run")
    arguments = parser.parse_args()
    agent = "PoisonedChat" if arguments.stateful else "PoisonedSolver"
    environment = [f"--env.use={HERE / 'desk.py'}:Desk"] if arguments.stateful else []
    with place(arguments.keep, "poison") as directory:
        settings = load_settings(
            DEMO,
            [
                f"--run.dir={directory}", "--run.name=poison", f"--trainer.steps={arguments.steps}",
                f"--agent.use={HERE / 'poisoned_solver.py'}:{agent}", f"--agent.deadline_s={DEADLINE_S}",
                *environment,
            ],
        )  # fmt: skip
        trained = train(settings)
        book = Book.of(settings.run_dir).figures(settings.trainer.max_attempts)
        holds = audit_run(settings.run_dir).consistent
    met = sum(book[f"tasks_{kind}"] for kind in ("raises", "hangs", "silent"))
    checks = [
        Check("after", trained["after"], ">=", 0.90),
        Check("poisoned_tasks_met", met, ">=", 10),
        *(Check(name, value, "==", 0) for name, value in book.items() if not name.startswith("tasks_")),
        Check("audit_holds", float(holds), "==", 1),
    ]
    return report([trained, book], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
