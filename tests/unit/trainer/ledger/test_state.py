"""The fold of the ledger agrees with the audit, which has its own, on any ledger."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tidegate.config import Settings
from tidegate.settings import sections
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.entries import LedgerEntry, State, entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.state import LedgerState, cancel_interrupted, read_ledger_state, restore_group
from tidegate.viewer.dashboard.run import FollowedRun

ENDINGS = (State.STEPPED, State.STEPPED, State.STALE, State.FILTERED, State.FAILED, State.CANCELLED)


class RandomRun:
    """Writes entries in an order that a run may write them, with checkpoints, kills and resumes."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.state = LedgerState()
        self.committed = self.version = 0
        self.record("run", "started", epoch=1, step=0, version=0, position=None)

    def record(self, kind: Any, event: str, **fields: Any) -> None:
        self.write(entry(kind, event, **fields))

    def write(self, line: LedgerEntry) -> None:
        self.state.apply({**line, "seq": self.ledger.position})
        self.ledger.record(line)

    def act(self) -> None:
        acts = (self.issue, self.end, self.publish, self.commit, self.resume)
        (act,) = self.rng.choices(acts, (6, 6, 2, 2, 1))
        act()

    def issue(self) -> None:
        group = f"g{len(self.state.groups)}"
        self.record("group", "issued", id=group, task=group, index=0, version=self.version, replaces=None)
        for slot in range(self.rng.randint(1, 3)):
            self.record("attempt", "issued", id=f"{group}.{slot}", group=group, slot=slot, number=1)

    def end(self) -> None:
        if not (live := self.state.live()):
            return
        group, state = self.rng.choice(live), self.rng.choice(ENDINGS)
        attempts = list(self.state.live_attempts(group).values())
        for attempt in attempts[: self.rng.randint(0, len(attempts))]:
            self.record("attempt", "ended", id=attempt, state=state.value, outcome="completed")
        if not self.state.live_attempts(group):
            versions = {"step": 1, "version": self.version, "oldest": self.version, "staleness": 0}
            self.record("group", "ended", id=group, state=state.value, **versions)

    def publish(self) -> None:
        self.version += 1
        self.record("run", "publishing", version=self.version, step=1)

    def commit(self) -> None:
        self.committed = self.ledger.position

    def resume(self) -> None:
        """Some resumes are killed before they have restored and cancelled every group."""
        self.version += 1
        position = self.committed or None
        self.record("run", "started", epoch=2, step=0, version=self.version, position=position)
        for group in self.state.discarded_groups():
            if self.rng.random() < 0.8:
                restore_group(self.copy(), group, self.write)
        for group in self.state.live():
            if self.rng.random() < 0.3:
                cancel_interrupted(self.copy(), group, self.write)

    def copy(self) -> LedgerState:
        return read_ledger_state(self.ledger.path)


@pytest.mark.parametrize("seed", range(40))
def test_the_counts_are_those_of_the_audit(tmp_path: Path, seed: int) -> None:
    (tmp_path / "config.toml").write_text(sections.dump(Settings.model_validate({"model": {"path": "m"}})))
    run = RandomRun(tmp_path, seed)
    for _ in range(60):
        run.act()
    run.ledger.close()
    if run.committed:
        marker = tmp_path / "checkpoints" / "step_1" / "COMMITTED"
        marker.parent.mkdir(parents=True)
        marker.write_text(json.dumps({"step": 1, "ledger": run.committed}))
    followed = FollowedRun(tmp_path)
    followed.refresh()
    state, shown, audit = read_ledger_state(run.ledger.path), followed.counts(), audit_run(tmp_path)
    assert shown is not None
    assert state.counts(state.groups, run.committed) == shown.groups == audit.groups
    assert state.counts(state.attempts, run.committed) == shown.attempts == audit.attempts
