"""CPU time per event of the trainer's own work: admission, ledger, rows, trajectories and metrics."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from step import SETTINGS, episodes

from tidegate.observer import Silent
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import BatchSelection
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.batch.microbatch import prefix_batches
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.records.metrics import MetricsLog
from tidegate.trainer.records.recorder import Recorder
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.types import Group, Outcome

GROUPS, FEW, MANY, TURNS = 64, 2, 16, 8
STEPS = 20
Costs = dict[str, float]


def timed(work: Callable[[], object], rounds: int) -> float:
    """Median CPU seconds of this process, after a warm-up."""
    taken = []
    for _ in range(rounds + 1):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return statistics.median(taken[1:])


def admit(size: int, record: Callable[[LedgerEntry], None]) -> None:
    """STEPS steps of GROUPS groups that are issued, completed, leased, trained on and published."""
    core = Admission(Rules(GROUPS, size, size, 1), record)
    for step in range(1, STEPS + 1):
        for _ in range(GROUPS):
            ticket = core.next_ticket()
            group = core.start_group(ticket, f"t{ticket.index}")
            assert group is not None
            for attempt in [core.start_attempt(group.id, slot) for slot in range(size)]:
                core.end_attempt(attempt, Outcome.COMPLETED)
            core.lease(group.id, core.version, None, 1)
        selection = core.select_batch()
        assert selection is not None
        core.step(selection, step)
        core.mark_live(core.versions.reserve(step))


def admission_costs(directory: Path, rounds: int) -> Costs:
    """Costs of a group and of an attempt without the ledger, and of an entry of the ledger."""
    few, many = (
        timed(lambda size=size: admit(size, lambda entry: None), rounds) / (GROUPS * STEPS)
        for size in (FEW, MANY)
    )
    attempt = (many - few) / (MANY - FEW)
    entries: list[LedgerEntry] = []
    admit(MANY, entries.append)
    with Ledger(directory / "ledger.jsonl") as ledger:
        entry = timed(lambda: [ledger.record(one) for one in entries], rounds) / len(entries)
    return {
        "admission_group_s": few - FEW * attempt,
        "admission_attempt_s": attempt,
        "ledger_entry_s": entry,
    }


def batch_of(groups: int) -> Batch:
    """Groups of FEW · 4 episodes of TURNS turns, half of each with reward 1."""
    size = 4 * FEW
    flat = episodes(groups, size, TURNS)
    for number, trajectory in enumerate(flat):
        trajectory.reward = float(number % 2)
    made = [Group(f"g{at}", "t", flat[at * size : (at + 1) * size]) for at in range(groups)]
    selection = BatchSelection(1, [group.id for group in made], [1] * groups)
    advantages = [[1.0 if one.reward else -1.0 for one in group.trajectories] for group in made]
    return Batch(selection, made, [], 0.0, 0.0, advantages)


def record_costs(directory: Path, rounds: int) -> Costs:
    """Costs per token of a batch's rows, trajectory lines and metrics, and of a line of metrics."""
    batch, one = batch_of(GROUPS), batch_of(1)
    tokens = sum(
        len(turn.delta_ids) + len(turn.output_ids)
        for group in batch.groups
        for trajectory in group.trajectories
        for turn in trajectory.turns
    )
    files = TrajectoryFiles(directory)
    counts = {f"groups/{number}": 0.0 for number in range(30)}
    with contextlib.closing(MetricsLog(directory)) as log:
        recorder = Recorder(log, files, Silent(), lambda: counts, lambda: 1)

        def line() -> None:
            log.append(recorder.line(1, recorder.batch_metrics(one, 1)))

        rows = timed(lambda: prefix_batches(batch.rows(), SETTINGS["microbatch_tokens"]), rounds)
        written = timed(lambda: files.batch(batch, 1), rounds)
        metrics = timed(lambda: recorder.batch_metrics(batch, 1), rounds)
        a_line = timed(lambda: [line() for _ in range(50)], rounds) / 50
    size = next(files.directory.glob("step_*.jsonl")).stat().st_size
    return {
        "rows_token_s": rows / tokens,
        "trajectory_token_s": written / tokens,
        "trajectory_token_bytes": size / tokens,
        "metrics_token_s": metrics / tokens,
        "metrics_line_s": a_line,
    }
