"""Takes over what an earlier start of the run left in the ledger, in files and at the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from tidegate.gateway.client import GatewayClient, GroupRow
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import GroupState, Phase, Slot, TaskTicket
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.state import LedgerState, cancel_interrupted, restore_group
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.start import Start
from tidegate.types import Group


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """Admission of a resumed run, and the groups that had not ended."""

    admission: Admission
    leased: list[Group] = field(default_factory=list)
    """Groups whose tokens the trainer has: they may be trained on now."""
    stale: list[str] = field(default_factory=list)
    """Groups that are too old now, or have tokens of abandoned versions."""
    cancelled: list[str] = field(default_factory=list)
    waiting: list[GroupRow] = field(default_factory=list)
    """Clients' groups and conversations at the gateway that no trainer has seen yet."""

    @property
    def continued(self) -> int:
        """Number of groups that continue."""
        return len(self.admission.groups)

    def lost_feedback(self, step: int, checkpoint_every: int) -> str | None:
        """Return how many of the clients' groups that wait cannot be trained on, why, and what to set.

        None if all can.

        Args:
            step: Step from which the run continues.
            checkpoint_every: The setting.
        """
        versions, rules = self.admission.versions, self.admission.rules
        sampled = [row for row in self.waiting if row.oldest_version is not None]
        fresh = [row for row in sampled if versions.admissible(row.oldest_version, row.newest_version)]
        old = sum(versions.exceeds_bound(versions.live, row.oldest_version) for row in sampled)
        discarded = len(sampled) - len(fresh) - old
        taken = rules.groups_per_batch * rules.publish_interval
        late = sum(
            versions.exceeds_bound(versions.live + number // taken, row.oldest_version)
            for number, row in enumerate(fresh)
            if rules.publishes
        )
        bound = f"trainer.max_staleness = {rules.max_staleness}"
        parts = [
            f"{discarded} have tokens of versions after step {step}, from which the trainer continues "
            f"(trainer.checkpoint_every = {checkpoint_every}: a killed trainer loses at most so many steps)",
            f"{old} are older than the staleness bound ({bound})",
            f"about {late} will exceed the bound before a batch takes them ({bound}, and "
            f"trainer.groups_per_batch = {rules.groups_per_batch})",
        ]
        lost = [part for part, number in zip(parts, (discarded, old, late), strict=True) if number]
        if not lost:
            return None
        return (
            f"warning: {discarded + old + late} of {len(self.waiting)} conversations and groups of clients "
            f"that wait are not trained on, and their feedback has no effect: {'; '.join(lost)}"
        )


async def take_over(
    start: Start,
    gateway: GatewayClient,
    files: TrajectoryFiles,
    record: Callable[[LedgerEntry], None],
    rules: Rules,
) -> ResumedRun:
    """Begin a new epoch, with the state that the previous one left in files and at the gateway.

    The gateway keeps the groups that continue and drops the run's other groups. Groups of other runs stay.
    """
    epoch = start.epoch
    # First: from here on no earlier trainer can lease or acknowledge a group.
    await gateway.begin_epoch(epoch)
    groups = await gateway.list_groups()
    await asyncio.to_thread(files.move_discarded, start.step, epoch)
    erased = start.past.erased.union(await gateway.erased_groups())
    kept = await asyncio.to_thread(files.read_discarded, start.open_groups() - erased)
    ready = {group.id for group in groups if group.state != "live"}
    resumed = restore_admission(start, record, rules, kept, ready)
    admitted = resumed.admission.groups
    for group in groups:
        continues = group.id in admitted and admitted[group.id].phase is Phase.READY
        if group.id in start.past.groups and not continues:
            await gateway.drop_group(group.id, epoch, "the run was killed while it had the group")
    waiting = [row for row in groups if row.id not in start.past.groups and row.id not in erased]
    return replace(resumed, waiting=[row for row in waiting if row.outcome is None])


def restore_admission(
    start: Start,
    record: Callable[[LedgerEntry], None],
    rules: Rules,
    kept: Mapping[str, Group],
    ready: Collection[str] = (),
) -> ResumedRun:
    """Restore admission from the ledger and the checkpoint, in a new epoch.

    Groups trained on after the marker are restored and may be trained on again; they end `stale` if
    they are too old now or not in `kept`. Other groups that have not ended continue if they are in `kept`
    or `ready`; the remaining ones are cancelled, as their agents have exited.

    Args:
        start: Where the run starts.
        record: Receives ledger entries.
        rules: Limits to enforce.
        kept: Groups whose tokens are in `trajectories/`, by id.
        ready: Ids of the groups that the gateway holds.
    """
    past, epoch = start.past, start.epoch
    position = start.position if past.epoch else None
    record(
        entry(
            "run", "started", epoch=epoch, step=start.step, version=start.version, position=position,
            rules=rules.for_ledger(),
        )
    )  # fmt: skip
    for task in sorted(past.quarantined) if start.lift_quarantine else ():
        lifted = entry("run", "lifted", task=task)
        record(lifted)
        past.apply(lifted)
    restored = past.discarded_groups()
    for name in restored:
        restore_group(past, name, record)
    live = {name: _continued(past, name, kept.get(name), name in ready) for name in past.live()}
    cancelled = [name for name, group in live.items() if group is None and name not in restored]
    for name in cancelled:
        cancel_interrupted(past, name, record)
    admission = Admission(rules, record, epoch=epoch, version=start.version, step=start.step)
    admission.group_counts.update(past.counts(past.groups))
    admission.attempt_counts.update(past.counts(past.attempts))
    admission.failures.causes = past.failures()
    admission.versions.abandoned = past.abandoned
    admission.restore(None if start.checkpoint is None else start.checkpoint.state, past.groups.values())
    admission.failures.quarantined = set(past.quarantined)
    others = [name for name in live if name not in restored and name not in cancelled]
    for name in [*restored, *others]:
        admission.resume_group(live[name] or _state(past, name, Phase.LEASED))
    # Before `leased` is made: the start has a new version, for which restored groups may be too old.
    stale = admission.end_stale_groups()
    leased = [kept[name] for name, group in admission.groups.items() if group.phase is Phase.LEASED]
    return ResumedRun(admission, leased, stale, cancelled)


def _continued(past: LedgerState, name: str, tokens: Group | None, ready: bool) -> GroupState | None:
    """Return the state of a group that can continue: all its tokens are kept, or the gateway has them."""
    slots = past.live_attempts(name).keys()
    if tokens is not None and {trajectory.slot for trajectory in tokens.trajectories} == slots:
        group = _state(past, name, Phase.LEASED)
        group.oldest, group.newest = tokens.oldest_version(), tokens.newest_version()
        group.solved = tokens.solved()
        for trajectory in tokens.trajectories:
            group.slots[trajectory.slot or 0].outcome = trajectory.outcome
        return group
    # A crash while a client's group was accepted leaves some of its attempts out of the ledger.
    complete = len(slots) == past.groups[name].issued.get("episodes", len(slots))
    complete = complete and not past.is_ending(name)
    return _state(past, name, Phase.READY) if ready and slots and complete else None


def _state(past: LedgerState, name: str, phase: Phase) -> GroupState:
    issued, attempts = past.groups[name].issued, past.live_attempts(name)
    slots = [Slot(done=attempts.get(slot)) for slot in range(1 + max(attempts, default=-1))]
    ticket = TaskTicket(issued["index"]) if "index" in issued else None  # None: a client formed it
    return GroupState(name, issued["task"], ticket, slots, phase=phase, client=issued.get("client"))
