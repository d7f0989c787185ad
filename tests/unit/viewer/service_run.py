"""A small run of a standing service, written by the trainer's own writers.

It has two keys, feedback with texts that would be markup, a refused and an unrewarded conversation,
and a version in test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.viewer.dashboard_run import EVIL, PROMPT, Writer
from tidegate.gateway.client import GroupRow
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State, entry
from tidegate.trainer.publish.canary import write_state
from tidegate.trainer.publish.sequential_test import Comparison
from tidegate.trainer.records.client_log import ClientLog
from tidegate.turn import VersionSpan
from tidegate.types import Group, Trajectory

SETTINGS = """
[run]
name = "standing"
[model]
path = "{model}"
[agent]
source = "client"
[trainer]
steps = 1000000000
max_stale_share = 0.1
gate_timeout_s = 60.0
[trainer.promotion]
mode = "canary"
margin = 0.1
"""


class ServiceWriter(Writer):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        (run_dir / "config.toml").write_text(SETTINGS.format(model=run_dir.parent / "model"))
        self.clients = ClientLog(run_dir)

    def conversation(
        self, name: str, reward: float, versions: tuple[int, ...] = (1,), **metadata: Any
    ) -> Group:
        """A conversation of one turn; its group is `client.name`, its feedback came after 2 s."""
        client = name.partition(".")[0]
        count = len(self.ids("#### 7"))
        cut = [0, *(1 + at for at in range(len(versions) - 1)), count]
        spans = tuple(VersionSpan(version, cut[at], cut[at + 1]) for at, version in enumerate(versions))
        received = [{"name": "feedback", "value": reward, "reply": None, "after_s": 2.0}]
        trajectory: Trajectory = self.trajectory(
            name, 0, [self.turn(0, None, PROMPT, "#### 7", version_spans=spans)], reward,
            reward_parts={"feedback": reward}, metadata={"received": received} | metadata, client=client,
        )  # fmt: skip
        return Group(name, "conversation", [trajectory])

    def take(self, group: Group) -> None:
        """Accepts a group, as admission does."""
        about = {"version": 1, "client": group.client, "episodes": 1}
        self.ledger.record(entry("group", "issued", id=group.id, task="conversation", **about))
        self.clients.offered(group, None)

    def train(self, step: int, groups: list[Group], stale: list[Group]) -> None:
        """Takes a step on the groups, and drops the stale ones before."""
        for group in stale:
            self.ledger.record(entry("group", "ended", id=group.id, state="stale"))
        batch = Batch(
            step, [0] * len(groups), groups,
            [(group, State.STALE) for group in stale], 0.5, 0.1,
        )  # fmt: skip
        batch.advantages = [[0.5] for _ in groups]
        self.files.batch(batch, step)
        for group in groups:
            self.ledger.record(entry("group", "ended", id=group.id, state="stepped", step=step, version=1))


def write_service_run(run_dir: Path) -> ServiceWriter:
    """One step on two conversations; the candidate that it wrote is in test."""
    run = ServiceWriter(run_dir)
    run.ledger.record(entry("run", "started", epoch=1, step=0, version=1, position=None))
    notes = {
        "0.feedback": {
            "comment": f"unkind {EVIL}",
            "correction": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": f"better {EVIL}"},
            ],
        }
    }
    odd = [{"name": EVIL, "value": 0.5, "reply": None, "after_s": 6.0}]
    good = run.conversation("shop.good", 1.0)
    noted = run.conversation("shop.noted", 0.0, (1, 2), feedback=notes)
    odd_one = run.conversation("desk.odd", 0.5, received=odd, feedback={"0.x": {"comment": "late"}})
    odd_one.trajectories[0].reward_parts = {EVIL: 0.5, "polite": 0.25}
    for group in (good, noted, odd_one):
        run.take(group)
    run.clients.offered(run.conversation("desk.refused", 1.0), "stale: its oldest token is of version 1")
    run.clients.ended([GroupRow("shop.silent", "live", 1, [], client="shop", outcome="unrewarded")])
    run.train(1, [good, noted], [odd_one])
    run.metrics(1, **{"time/publish_gate": 3.0})
    run.ledger.record(entry("run", "publishing", version=2, step=1, candidate=True))
    write_state(run_dir, 0.1, 2, Comparison(0.8, 0.75, 40, 60, -0.2, 0.3))
    return run


def write_many(run_dir: Path, groups: int, batch: int = 100) -> None:
    """Appends the ledger's and the clients' lines of many conversations, each trained on."""
    ledger, clients = [], []
    for number in range(groups):
        group, step = f"shop.m{number}", 2 + number // batch
        common = {"kind": "group", "id": group, "time": 1.0, "seq": number}
        ledger.append(
            {**common, "event": "issued", "task": "conversation", "version": step, "client": "shop"}
        )
        ledger.append({**common, "event": "ended", "state": "stepped", "step": step, "staleness": 0})
        feedback = [{"name": "feedback", "value": number % 2, "after_s": 2.0}]
        row = {"reward": number % 2, "parts": {}, "feedback": feedback, "oldest": step, "newest": step}
        clients.append({"time": 1.0, "group": group, "client": "shop", "state": "taken", "episodes": [row]})
        if number % batch == batch - 1:
            told = {"kind": "run", "event": "publishing", "version": step, "step": step, "time": 1.0}
            ledger.append({**told, "seq": number})
    for name, lines in (("ledger.jsonl", ledger), ("clients.jsonl", clients)):
        with (run_dir / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
