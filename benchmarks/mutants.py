# ruff: noqa: E501 - one fault per line
"""Mutation test of the admission core: checks that its tests detect each planted fault.

Every fault is one line of `tidegate/trainer/admission/core.py` (or of another module in its
folder, or of `ledger/state.py`) changed in a copy of the package; then the core's own tests run on the copy. A fault that no test detects is a gap in the tests.

    python benchmarks/mutants.py [--json] [--only NAME]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import Check, parser_of, report

ROOT = Path(__file__).parents[1]
CORE = Path("tidegate/trainer/admission/core.py")
RULES, GROUPS, OUTAGE = (CORE.with_name(f"{name}.py") for name in ("rules", "state", "outage"))
VERSIONS, IN_FLIGHT, FAILURES = (
    CORE.with_name(f"{name}.py") for name in ("versions", "groups_in_flight", "failures")
)
RESUME = Path("tidegate/trainer/ledger/state.py")
FILES = (CORE, RULES, GROUPS, OUTAGE, VERSIONS, IN_FLIGHT, FAILURES, RESUME)
TESTS = [
    "tests/unit/trainer/admission/test_admission.py",
    "tests/unit/trainer/admission/test_admission_world.py",
    "tests/unit/trainer/admission/test_blame.py",
    "tests/unit/trainer/admission/test_clients.py",
    "tests/unit/trainer/admission/test_pace.py",
    "tests/unit/trainer/ledger/test_recovery.py",
    "tests/unit/trainer/ledger/test_versions.py",
]
DEADLINE_S = 300


@dataclass(frozen=True)
class Fault:
    name: str
    was: str
    becomes: str
    file: Path = CORE


FAULTS = [
    Fault("gate_one_too_many", "len(self.groups) >= self.rules.capacity", "len(self.groups) > self.rules.capacity"),
    Fault("gate_ignores_interval", "* self.groups_per_batch * self.publish_interval", "* self.groups_per_batch", RULES),
    Fault("gate_one_batch_more", "return (staleness + 1) * self", "return (staleness + 2) * self", RULES),
    Fault("gate_forgets_concurrency", "busy + self.rules.group_size > self.rules.max_running", "False"),
    Fault("gate_ignores_slow_engines", "busy + self.rules.group_size > self.pace.limit", "False"),
    Fault("slow_engines_are_the_tasks_fault", "blameless = slow or outcome", "blameless = outcome", FAILURES),
    Fault("slow_engines_prolong_an_outage", "            if slow or outcome not in INCONCLUSIVE:\n", "            if outcome not in INCONCLUSIVE:\n", OUTAGE),
    Fault("gate_counts_groups", "        self._in_flight.unsettled -= 1\n        return self._settle", "        return self._settle"),
    Fault("gate_never_lets_a_large_group_in", "if (busy := self._in_flight.unsettled) and busy + self.rules.group_size > self.rules.max_running", "if (busy := self._in_flight.unsettled) + self.rules.group_size > self.rules.max_running"),
    Fault("failed_groups_keep_their_places", "self.unsettled -= sum(not slot.settled(self._rules) for slot in group.slots)", "pass", IN_FLIGHT),
    Fault("bound_off_by_one", "staleness > bound):", "staleness > bound + 1):", VERSIONS),
    Fault("bound_too_strict", "staleness > bound):", "staleness >= bound):", VERSIONS),
    Fault("batch_takes_the_stale", "if age is None or not self.versions.admissible(group.oldest, group.newest):", "if age is None:"),
    Fault("stale_groups_are_left", "        for group_id in stale:\n", "        for group_id in []:\n"),
    Fault("unknown_version_is_fresh", "if oldest is None or staleness is None or (bound", "if oldest is None:\n            return True\n        if staleness is None or (bound", VERSIONS),
    Fault("abandoned_lineage_is_fresh", "return not any(oldest <= version <= last for version in self.abandoned)", "return True", VERSIONS),
    Fault("abandoned_beside_older_is_fresh", "last = oldest if newest is None else newest", "last = oldest", VERSIONS),
    Fault("restored_and_issued_again", "        self._recycled = deque(ticket for ticket in self._recycled if ticket.index != index)\n", "", GROUPS),
    Fault("restored_skips_tasks", "            self._recycled.append(self._new_ticket())\n", "            self._new_ticket()\n", GROUPS),
    Fault("restored_cannot_be_selected", "        if group.phase is Phase.LEASED:\n            self.leased.append(group.id)\n", "", IN_FLIGHT),
    Fault("stopped_tasks_are_lost", "            self.cursor.recycle(TaskTicket(ticket.index, None, ticket.stale_retries))\n", "            pass\n"),
    Fault("future_version_is_fresh", "return None if oldest is None or oldest > self.live else", "return None if oldest is None else", VERSIONS),
    Fault("batch_takes_fewer", "if len(chosen) < size:", "if len(chosen) < 1:"),
    Fault("batch_newest_first", "choose(self._in_flight.leased,", "choose(reversed(self._in_flight.leased),"),
    Fault("stale_is_never_replaced", "if ticket is not None and ticket.stale_retries < self.rules.max_stale_retries:", "if False:"),
    Fault("stale_is_replaced_for_ever", "if ticket is not None and ticket.stale_retries < self.rules.max_stale_retries:", "if ticket is not None:"),
    Fault("replaced_twice", "            self.cursor.recycle(TaskTicket(ticket.index, group.id,", "            self.cursor.recycle(TaskTicket(ticket.index, group.id, 1))\n            self.cursor.recycle(TaskTicket(ticket.index, group.id,"),
    Fault("replacement_says_nothing", "TaskTicket(ticket.index, group.id, ticket.stale_retries + 1)", "TaskTicket(ticket.index, None, ticket.stale_retries + 1)"),
    Fault("one_attempt_too_many", "self.failures >= rules.max_attempts", "self.failures > rules.max_attempts", GROUPS),
    Fault("cancelled_counts_as_failure", "slot.failures += not blameless", "slot.failures += not (slow or outcome is Outcome.INFRA_ERROR)", FAILURES),
    Fault("cancelled_has_no_budget", "slot.infra_failures += blameless", "slot.infra_failures += slow or outcome is Outcome.INFRA_ERROR", FAILURES),
    Fault("partial_group_too_small", "if len(group.slots) - lost < self.rules.min_group_size:", "if len(group.slots) - lost < self.rules.min_group_size - 1:"),
    Fault("ready_too_early", "if not all(slot.settled(self.rules) for slot in group.slots):", "if not any(slot.settled(self.rules) for slot in group.slots):"),
    Fault("no_quarantine", "                self.failures.quarantine(group, outcome, why)\n", "                pass\n"),
    Fault("quarantined_tasks_start", "        if task in self.failures.quarantined:\n            return None\n", ""),
    Fault("late_end_resurrects", "        if (found := self._in_flight.slot_of(attempt)) is None:\n            return AttemptDecision.LATE", "        if (found := self._in_flight.slot_of(attempt)) is None:\n            return AttemptDecision.RETRY"),
    Fault("attempt_left_live", "            if slot.running is not None:\n                self.end_attempt(slot.running", "            if False:\n                self.end_attempt(slot.running", IN_FLIGHT),
    Fault("version_used_twice", "        self.reserved += 1\n", "        self.reserved = self.live + 1\n", VERSIONS),
    Fault("publish_backwards", "if not self.live < version <= self.reserved:", "if not version <= self.reserved:", VERSIONS),
    Fault("stepped_makes_room_at_once", "            group.phase = Phase.UNPUBLISHED\n", "            group.phase = Phase.UNPUBLISHED\n            del self.by_id[group_id]\n", IN_FLIGHT),
    Fault("stepped_never_makes_room", "if g.phase is Phase.UNPUBLISHED]:", "if False]:", IN_FLIGHT),
    Fault("will_be_stale_spares_the_ready", "waiting = (Phase.RUNNING, Phase.READY)", "waiting = (Phase.RUNNING,)"),
    Fault("will_be_stale_takes_the_admissible", "and version - oldest > bound", "and version - oldest >= bound", VERSIONS),
    Fault("commit_forgets_attempts", "zip((self.group_counts, self.attempt_counts), stepped, strict=True)", "zip((self.group_counts,), stepped, strict=False)", IN_FLIGHT),
    Fault("resume_loses_tickets", "for ticket in (*self._recycled, *live)]", "for ticket in self._recycled]", GROUPS),
    Fault("resume_forgets_the_cursor", "        self._index = progress[\"cursor\"]\n", "", GROUPS),
    Fault("resume_forgets_quarantine", "            self.quarantines[line[\"task\"]] = line\n", "            pass\n", RESUME),
    Fault("resume_forgets_that_it_was_lifted", "            self.quarantines.pop(line[\"task\"], None)\n", "            pass\n", RESUME),
    Fault("outages_quarantine_at_a_resume", " if line.get(\"outcome\") != infra", "", RESUME),
    Fault("infrastructure_is_the_tasks_fault", "slot.failures += not blameless", "slot.failures += 1", FAILURES),
    Fault("infrastructure_has_no_budget", "self.infra_failures >= rules.max_infra_attempts", "False", GROUPS),
    Fault("outages_spend_budgets", "        if self._outage.leaves_uncharged(attempt, outcome):\n            details", "        if False:\n            details", FAILURES),
    Fault("outages_do_not_pause", "if (outage := self.outage.why) is not None and", "if (outage := self.outage.why) is not None and False and"),
    Fault("an_outage_without_running_ones_never_ends", "(self.outage.down or self._in_flight.unsettled)", "True"),
    Fault("attempts_start_in_an_outage", "if not self.outage.may_attempt():", "if False:"),
    Fault("infrastructure_gives_a_task_up", "outcome.trainable or outcome.is_infrastructure_failure or found", "outcome.trainable or found", FAILURES),
    Fault("any_number_of_probes", "(self.suspected is None or self.probe is None)", "True", OUTAGE),
    Fault("probes_are_not_remembered", "            self.probe = attempt\n", "            pass\n", OUTAGE),
    Fault("a_cancelled_probe_stays", "            self._outage.forget(attempt)\n", "            pass\n", IN_FLIGHT),
    Fault("a_failed_probe_ends_the_outage", "            if slow or outcome not in INCONCLUSIVE:\n", "            if True:\n", OUTAGE),
    Fault("outages_are_never_suspected", "sum(self._recent) >= THRESHOLD", "False", OUTAGE),
    Fault("a_late_probe_ends_the_outage", "(Outcome.INFRA_ERROR, Outcome.TIMEOUT, Outcome.REWARD_ERROR, Outcome.CANCELLED)", "(Outcome.INFRA_ERROR, Outcome.CANCELLED)", OUTAGE),
    Fault("a_good_probe_is_spared", "return self.overlapped(attempt) and not (attempt == self.probe and outcome not in INCONCLUSIVE)", "return self.overlapped(attempt)", OUTAGE),
    Fault("all_is_spared", "return self.overlapped(attempt) and not (attempt == self.probe and outcome not in INCONCLUSIVE)", "return True", OUTAGE),
    Fault("an_outage_that_is_over_is_charged", "return self.why is not None or self._running.get(attempt, self._ended_outages) < self._ended_outages", "return self.why is not None", OUTAGE),
    Fault("a_probe_survives_lost_engines", "            self.probe = None  # it fails", "            pass  # it fails", OUTAGE),
    Fault("remains_of_an_outage_are_evidence", "        elif not overlapped:\n", "        elif self.why is None:\n", OUTAGE),
    Fault("resume_forgets_lost_workers", "and not item.end.get(\"lost\")", "", RESUME),
    Fault("outages_are_not_in_the_ledger", "        if (before is None) != (now is None):", "        if False:", OUTAGE),
    Fault("filtered_for_ever", "        self.filtered += 1\n", "", FAILURES),
    Fault("a_step_gives_no_hope", "        self.filtered = self.cut = self.solved = 0\n", "", FAILURES),
    Fault("exhausted_too_early", "last = group.slots[slot].failures + 1 >= self", "last = group.slots[slot].failures + 2 >= self", FAILURES),
    Fault("exhausted_twice", "return last and group.task not in self.quarantined", "return last", FAILURES),
    Fault("clients_groups_of_any_size", "if not rules.min_group_size <= number <= rules.group_size:", "if False:", IN_FLIGHT),
    Fault("clients_groups_of_the_future", "if newest is not None and newest > version:", "if False:", IN_FLIGHT),
    Fault("clients_groups_of_any_age", "    if not admissible:", "    if False:", IN_FLIGHT),
    Fault("issued_groups_are_not_in_the_ledger", "        self._record(entry(\"group\", \"issued\", id=group.id, task=group.task, **details))\n", "", IN_FLIGHT),
    Fault("clients_episodes_are_not_in_the_ledger", "            self.issue_attempt(state, slot, attempt, 1)\n", "            self._attempts[attempt] = (group.id, slot)\n            self.attempt_counts[State.LIVE] += 1\n", IN_FLIGHT),
    Fault("issued_groups_are_not_counted", "        self.group_counts[State.LIVE] += 1\n", "", IN_FLIGHT),
    Fault("a_client_has_more_than_its_share", "taken[client] >= limit:", "taken[client] > limit:", IN_FLIGHT),
    Fault("no_client_has_a_share", "        if client is not None and taken[client] >= limit:", "        if False:", IN_FLIGHT),
    Fault("any_number_of_a_client_waits", "waiting >= rules.client_capacity:", "False:", IN_FLIGHT),
    Fault("all_clients_wait_together", "waiting = sum(self.groups[group_id].client == group.client for", "waiting = sum(True for"),
    Fault("shares_without_a_share", "if rules.client_share < 1 and", "if", IN_FLIGHT),
    Fault("rolled_back_versions_are_fresh", "        self.abandoned |= set(range(to + 1, version + 1))\n", "", VERSIONS),
    Fault("roll_back_takes_its_target_too", "set(range(to + 1, version + 1))", "set(range(to, version + 1))", VERSIONS),
    Fault("a_candidate_stops_the_gate", "self.publishing = not candidate", "self.publishing = True", VERSIONS),
    Fault("groups_start_while_it_goes_live", "        self.publishing = True\n        self._record", "        self._record", VERSIONS),
    Fault("the_gate_stays_shut", "        self.live = version\n        self.publishing = False\n", "        self.live = version\n", VERSIONS),
    Fault("a_resume_forgets_roll_backs", 'self.abandoned |= set(range(line["to"] + 1, line["version"] + 1))', "pass", RESUME),
    Fault("ended_twice_in_the_count", "        self.group_counts[State.LIVE] -= 1\n", "", IN_FLIGHT),
]  # fmt: skip


def caught(fault: Fault, copy: Path) -> bool:
    """Whether the tests, each in its own process, fail on a package with the fault."""
    for file in FILES:
        text = (ROOT / file).read_text(encoding="utf-8")
        changed = text.replace(fault.was, fault.becomes) if file == fault.file else text
        (copy / file).write_text(changed, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{fault.name}: the tests did not run:\n{ended.stdout.decode()[-2000:]}")
    return ended.returncode == 1


def overlay(copy: Path) -> None:
    """Link the repository into `copy`, except for the files that `caught` writes."""
    for name in ("tests", "examples", "pyproject.toml"):
        (copy / name).symlink_to(ROOT / name)
    for path in (ROOT / "tidegate").rglob("*"):
        target = copy / path.relative_to(ROOT)
        if path.is_dir() and not path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        elif path.relative_to(ROOT) not in FILES and "__pycache__" not in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", help="name of a single fault to test")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in (None, fault.name)]
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    if gone := [fault.name for fault in faults if texts[fault.file].count(fault.was) != 1]:
        parser.error(
            f"the text to replace does not occur exactly once in its file: {', '.join(gone)}; update the list of faults"
        )
    results = []
    with tempfile.TemporaryDirectory(prefix="tidegate-mutants-") as where:
        overlay(Path(where))
        for fault in faults:
            results.append({"fault": fault.name, "caught": caught(fault, Path(where))})
            print(
                f"{fault.name:<36}{'caught' if results[-1]['caught'] else 'SURVIVED'}",
                file=sys.stderr,
                flush=True,
            )
    found = sum(bool(one["caught"]) for one in results)
    checks = [
        Check("planted", len(faults), ">=", 1 if arguments.only else 20),
        Check("caught", found, "==", len(faults)),
    ]
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
