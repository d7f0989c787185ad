"""Runs a million events through the admission core, and compares it with a published capacity formula.

The seeded driver of the tests (rejection, stragglers, partial groups, publish intervals 1 to 4, crashes and
resumes, outages) checks the ledger, the staleness bound, the failure counts and liveness. The baseline
reimplements the formula that AReaL publishes for its staleness manager: capacity = (max_staleness + version +
1) · batch − (accepted + running), with batches taken in completion order and not checked on assembly.

    python benchmarks/admission.py [--json] [--events 1000000]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from common import Check, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.admission_driver import World
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules

EVENTS_A_WORLD = 20_000
BASELINE_EVENTS = 50_000


def admission_rules(rng: random.Random) -> Rules:
    size = rng.randint(2, 6)
    return Rules(
        groups_per_batch=rng.randint(1, 6),
        group_size=size,
        min_group_size=rng.randint(2, size),
        max_staleness=rng.choice([0, 1, 2, 4, 8, None]),
        publish_interval=rng.randint(1, 4),
        max_attempts=rng.randint(1, 4),
        max_infra_attempts=rng.randint(1, 5),
        max_stale_retries=rng.randint(0, 3),
        max_running=rng.choice([3, 9, 1 << 30]),
    )


def drive(events: int) -> dict[str, object]:
    """Simulates random worlds until `events` events have occurred; raises at the first broken invariant."""
    started, done, crashes, steps = time.perf_counter(), 0, 0, 0
    while done < events:
        rng = random.Random(done)
        world = World(
            admission_rules(rng),
            rng,
            rng.random() / 3,
            rng.random() * 0.8,
            rng.choice([0.0, 0.0005, 0.005]),
            rng.choice([0.0, 0.001, 0.01]),
        )
        some = min(EVENTS_A_WORLD, events - done)
        world.run(some)
        done, crashes, steps = done + some, crashes + world.crashes, steps + world.step
    seconds = time.perf_counter() - started
    return {"run": "core", "events": done, "steps": steps, "crashes": crashes, "seconds": round(seconds, 1)}


class Formula(Admission):
    """The baseline: a group may start while the formula allows it; stale groups are not dropped."""

    accepted = 0

    def blocked_by(self) -> str | None:
        ahead = (self.rules.max_staleness or 0) + self.version + 1
        room = ahead * self.rules.groups_per_batch - (self.accepted + self._running)
        return None if room > 0 else "the formula"

    def lease(self, group_id: str, oldest: int | None, newest: int | None = None) -> None:
        self.accepted += 1
        super().lease(group_id, oldest, newest)

    def filter_group(self, group_id: str) -> None:
        self.accepted -= 1
        super().filter_group(group_id)

    def admissible(self, oldest: int | None, newest: int | None = None) -> bool:
        return True


class Unchecked(World):
    """The same world, but the staleness is measured and not asserted."""

    worst = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.core = Formula(self.rules, self.enter)

    def _check_bound(self, one: dict[str, object]) -> None:  # type: ignore[override]
        self.worst = max(self.worst, int(one["staleness"]))  # type: ignore[call-overload]

    def check(self) -> None:
        """Checks nothing: the formula's counts differ from the ledger's."""

    def _publish(self, cut: object) -> None:
        self.core.mark_live(self.core.versions.reserve(self.step))


def baseline(bound: int) -> dict[str, object]:
    world = Unchecked(Rules(4, 4, 4, bound, max_stale_retries=0), random.Random(0), 0.02, 0.5)
    world.run(BASELINE_EVENTS)
    return {
        "run": "formula",
        "events": BASELINE_EVENTS,
        "steps": world.step,
        "bound": bound,
        "worst": world.worst,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--events", type=int, default=1_000_000)
    arguments = parser.parse_args()
    broken = 0
    try:
        core = drive(arguments.events)
    except AssertionError as error:
        broken, core = 1, {"run": "core", "broken": str(error)}
    formula = baseline(2)
    checks = [
        Check("events", float(core.get("events", 0)), ">=", float(arguments.events)),  # type: ignore[arg-type]
        Check("broken_invariants", float(broken), "==", 0),
        Check("formula_worst_staleness", float(formula["worst"]), ">", 2),  # type: ignore[arg-type]
    ]
    return report([core, formula], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
